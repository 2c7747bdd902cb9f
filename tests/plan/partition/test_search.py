from __future__ import annotations

from itertools import combinations, groupby, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smpkit.errors import ConfigError
from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.partition.search import assign, partition
from tests.plan.counted import lines_of


def layers(num_layers: int, num_bytes: int = 10, flops: float = 1.0) -> list[UnitCost]:
    return [UnitCost(f"layers.{i}", num_bytes, 0, flops) for i in range(num_layers)]


def llama_8b(sequence_length: int = 2048) -> list[UnitCost]:
    """Return units like Llama 3 8B's in bfloat16: 32 layers, a vocabulary of 128256, embedding and head apart."""
    vocabulary, width = 128256, 4096
    layer = 2 * width * width + 2 * width * 1024 + 3 * width * 14336
    hidden = 2 * sequence_length * width
    blocks = [UnitCost(f"layers.{i}", 2 * layer, 17 * hidden, 2.0 * sequence_length * layer) for i in range(32)]
    head = UnitCost("head", 2 * vocabulary * width, 0, 2.0 * sequence_length * vocabulary * width)
    return [UnitCost("embed", 2 * vocabulary * width, hidden), *blocks, UnitCost("norm", 2 * width, hidden), head]


def places(found: Assignment) -> str:
    return "".join(str(place) for _, place in found.units)


# A layer is 1/8.6 (four ranks) or 1/4.3 (eight) of a mean stage: no contiguous cut does better than 9 and 5 layers.
@pytest.mark.parametrize(("num_partitions", "worst"), [(4, 9 / 8.602), (8, 5 / 4.301)])
def test_llama_8b_is_cut_evenly(num_partitions: int, worst: float) -> None:
    assert partition(llama_8b(), num_partitions, 0.2).compute_imbalance == pytest.approx(worst, abs=1e-3)


MIXED = [UnitCost("embed", 30, 0, 0.0), *layers(3), UnitCost("head", 0, 0, 3.0)]
FREE = [UnitCost(name) for name in "abcd"]


@pytest.mark.parametrize(
    ("units", "memory_weight", "expected"),
    [
        (MIXED, 1.0, "01111"),
        (MIXED, 0.0, "00001"),
        (layers(4, num_bytes=0), 1.0, "0011"),
        *((FREE, weight, "0011") for weight in (0.0, 0.5, 1.0)),
        ([UnitCost("a", 3), UnitCost("b", 1), UnitCost("c", 1)], 0.2, "011"),
    ],
    ids=["memory", "compute", "no memory", "free, compute", "free, both", "free, memory", "parameters without flops"],
)
def test_memory_weight_decides_what_is_divided(units: list[UnitCost], memory_weight: float, expected: str) -> None:
    assert places(partition(units, 2, memory_weight)) == expected


def test_a_checkpointed_unit_computes_its_forward_twice() -> None:
    # Forward, backward and recomputation of a checkpointed layer take 4 forwards, of a plain one 3: 12 to 12.
    units = [UnitCost(f"layers.{i}", flops=1.0, recomputed_flops=1.0) for i in range(3)]
    units += [UnitCost(f"head.{i}", flops=1.0) for i in range(4)]
    found = partition(units, 2, memory_weight=0.0)
    assert places(found) == "0001111"
    assert found.compute_imbalance == 1.0
    assert found.step_flops == (4.0, 4.0)
    assert Assignment.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("num_layers", "num_partitions", "num_chunks", "expected"),
    [(8, 2, 2, "00110011"), (8, 4, 2, "01230123"), (10, 4, 2, "0123012233"), (7, 2, 3, "0101011"), (5, 1, 2, "00000")],
)
def test_equal_layers_are_dealt_in_turns(num_layers: int, num_partitions: int, num_chunks: int, expected: str) -> None:
    assert places(partition(layers(num_layers), num_partitions, 0.5, num_chunks=num_chunks)) == expected


def test_chunks_are_placed_by_hand() -> None:
    pinned = {f"layers.{index}": index for index in range(4)}
    assert places(assign(layers(5), 2, pinned, 3, num_chunks=2)) == "01011"
    with pytest.raises(ConfigError, match=r"`layers\.0` is put on partition 4, and there are 4"):
        assign(layers(5), 2, {"layers.0": 4}, 0, num_chunks=2)


@given(
    flops=st.lists(st.integers(1, 9), min_size=4, max_size=9),
    num_partitions=st.integers(2, 3),
    num_chunks=st.integers(2, 3),
)
def test_no_cut_makes_the_dearest_chunk_cheaper(flops: list[int], num_partitions: int, num_chunks: int) -> None:
    num_parts = num_partitions * num_chunks
    assume(len(flops) >= num_parts)
    units = [UnitCost(f"layers.{i}", flops=each) for i, each in enumerate(flops)]
    every = [
        max(sum(flops[start:end]) for start, end in pairwise([0, *inner, len(flops)]))
        for inner in combinations(range(1, len(flops)), num_parts - 1)
    ]
    row = [place for _, place in partition(units, num_partitions, 0.0, num_chunks=num_chunks).units]
    runs = [
        [index for _, index in run] for _, run in groupby(zip(row, range(len(row)), strict=True), lambda each: each[0])
    ]
    assert [row[run[0]] for run in runs] == [chunk % num_partitions for chunk in range(num_parts)]
    assert max(sum(flops[index] for index in run) for run in runs) == min(every)


TIED = [UnitCost("embed", 40, 0, 0.0, shared={"wte": 40}), *layers(4), UnitCost("head", 40, 0, 1.0, shared={"wte": 40})]


def test_tied_units_may_live_apart_with_a_copy_each() -> None:
    assert places(partition(TIED, 2, 0.0)) == "000111"


@pytest.mark.parametrize(
    ("names", "pins", "default", "expected"),
    [
        ("model.0.a model.0.b model.1.a", {"model": 1, "model.0": 2, "model.0.b": 0}, 0, "201"),
        ("layers.0 layers.1 layers.2", {"": 1}, 0, "111"),
        ("layer layer2", {"layer": 1}, 0, "10"),
        ("layers.0 layers.1 layers.2 layers.3", {"layers.2": 0}, 2, "2202"),
    ],
    ids=["the innermost name wins", "the whole model", "whole names", "the rest goes to the default"],
)
def test_a_name_covers_what_is_below_it(names: str, pins: dict[str, int], default: int, expected: str) -> None:
    assert places(assign([UnitCost(name) for name in names.split()], 3, pins, default)) == expected


@pytest.mark.parametrize(
    ("num_units", "num_partitions", "num_chunks", "message"),
    [
        (3, 4, 1, "pipeline_parallel_degree: the model has 3 units, too few for 4 partitions"),
        (1, 2, 1, "pipeline_parallel_degree: the model has 1 unit, too few for 2 partitions"),
        (0, 1, 1, "pipeline_parallel_degree: the model has 0 units, too few for 1 partition\n"),
        (7, 2, 4, "virtual_pipeline_degree: the model has 7 units, too few for 2 partitions of 4 chunks each"),
    ],
    ids=["few", "one", "none", "few for the chunks"],
)
def test_what_cannot_be_cut_is_refused(num_units: int, num_partitions: int, num_chunks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(layers(num_units), num_partitions, 0.5, num_chunks=num_chunks)


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        ({"layers.0": 2}, "`layers.0` is put on partition 2, and there are 2"),
        ({"layers.0": -1}, "`layers.0` is put on partition -1, and there are 2"),
        ({"layer.0": 1}, "no unit is called `layer.0` or is below it\n.*did you mean `layers.0`"),
        ({"zzz": 1}, "no unit is called `zzz` or is below it\n.*name a unit"),
        ({"layers.0": 5, "other": 0}, "`layers.0` is put on partition 5, and there are 2\n(.*\n)*.*called `other`"),
    ],
    ids=["large", "negative", "near", "unknown", "every one at once"],
)
def test_places_that_do_not_exist_are_refused(pinned: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign(layers(2), 2, pinned, 0)


def test_the_hint_names_a_degree_that_works() -> None:
    with pytest.raises(ConfigError) as caught:
        partition(TIED, 7, 0.5)
    assert caught.value.problems[0].hint == "lower `pipeline_parallel_degree` to 6 or less"
    partition(TIED, 6, 0.5)


@st.composite
def random_units(draw: st.DrawFn) -> list[UnitCost]:
    """Units of which some share parameters, with flops that sum to a power of two, so that shares are exact."""
    sizes = draw(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 9), st.sets(st.sampled_from("xyz"))), min_size=1, max_size=8
        )
    )
    return [
        UnitCost(str(i), own + 5 * len(keys), activation, 1.0, shared=dict.fromkeys(sorted(keys), 5))
        for i, (own, activation, keys) in enumerate(sizes)
    ]


@given(units=random_units(), num_partitions=st.integers(1, 4), memory_weight=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_every_partition_gets_neighbours_and_no_cut_has_a_cheaper_worst_part(
    units: list[UnitCost], num_partitions: int, memory_weight: float
) -> None:
    num_partitions = min(num_partitions, len(units))

    def memory_of(part: list[UnitCost]) -> int:
        shared = {key: num_bytes for unit in part for key, num_bytes in unit.shared.items()}
        whole = sum(unit.parameters_bytes - sum(unit.shared.values()) + unit.activation_bytes for unit in part)
        return whole + sum(shared.values())

    def worst(found: Assignment) -> float:
        parts = [[unit for unit in units if found.partition_of[unit.name] == part] for part in range(num_partitions)]
        memory = [memory_of(part) / memory_of(units) if memory_of(units) else 0.0 for part in parts]
        return max(
            memory_weight * share + (1 - memory_weight) * flops / len(units)
            for share, flops in zip(memory, found.step_flops, strict=True)
        )

    every = []
    for inner in combinations(range(1, len(units)), num_partitions - 1):
        ends = [0, *inner, len(units)]
        pins = {units[i].name: part for part, (start, end) in enumerate(pairwise(ends)) for i in range(start, end)}
        every.append(worst(assign(units, num_partitions, pins, 0)))
    found = partition(units, num_partitions, memory_weight)
    row = [place for _, place in found.units]
    assert row == sorted(row)
    assert set(row) == set(range(num_partitions))
    assert worst(found) <= min(every) + 1e-8


@pytest.mark.parametrize(("num_units", "num_partitions"), [(50, 8), (200, 4)])
def test_the_work_grows_with_the_square_of_the_units(num_units: int, num_partitions: int) -> None:
    units = [UnitCost(str(i), i * 7919 % 101, 0, i * 104729 % 103) for i in range(num_units)]
    assert lines_of(lambda: partition(units, num_partitions, 0.5)) < 10 * num_units**2 * num_partitions
