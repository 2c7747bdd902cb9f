from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.memory import ModelFacts, RankMemory, TensorFacts, UnitFacts, memory_of_rank
from smpkit.plan.mesh import Mesh
from smpkit.plan.optimizers import OPTIMIZERS
from smpkit.plan.partition.assignment import UnitCost
from smpkit.plan.partition.search import assign


def tensor(name: str, elements: int, dtype: str = "float32", *, trainable: bool = True) -> TensorFacts:
    return TensorFacts(name, dtype, elements, elements * (2 if dtype == "bfloat16" else 4), trainable)


def model(*, traced: bool = True) -> ModelFacts:
    """An embedding tied to a head, a block with a frozen half and a buffer, and a loose scale that every rank has."""
    tensors = [
        tensor("embed", 100),
        tensor("block.weight", 50, "bfloat16"),
        tensor("block.frozen", 30, trainable=False),
        tensor("scale", 7),
    ]
    shared = {"embed": 400}
    units = (
        UnitFacts(UnitCost("embed", 400, 1000, shared=shared), ("embed",)),
        UnitFacts(UnitCost("block", 220, 2000), ("block.weight", "block.frozen")),
        UnitFacts(UnitCost("head", 400, 500, shared=shared), ("embed",)),
    )
    return ModelFacts("Net", units, {each.name: each for each in tensors}, ("scale",), traced)


def config(**parameters: Any) -> ModelParallelConfig:
    return ModelParallelConfig.from_sources({"ddp": True, **parameters}, None)[0]


def memory(places: dict[str, int], *, traced: bool = True, replicated: bool = False) -> list[RankMemory]:
    facts = model(traced=traced)
    assignment = assign(facts.costs, 2, places, 0)
    mesh = Mesh(2, 1, 1 + replicated)
    return [memory_of_rank(facts, assignment, config(), mesh, [rank], 3 - 2 * rank, "adamw") for rank in (0, 1)]


APART = {"embed": 0, "block": 0, "head": 1}
TOGETHER = {"embed": 0, "block": 1, "head": 0}


def test_every_kind_is_counted() -> None:
    first, last = memory(APART)
    assert first.parameters_bytes == 400 + 100 + 120 + 28
    assert first.gradients_bytes == 400 + 100 + 28
    assert first.optimizer_bytes == 2 * (400 + 100 + 28)
    assert first.activations_bytes == 3 * (1000 + 2000)
    assert first.total_bytes == 648 + 528 + 1056 + (400 + 28) + 9000
    assert (last.parameters_bytes, last.activations_bytes) == (428, 500)


def test_half_precision_has_masters_and_their_gradients_only_in_a_step() -> None:
    facts = model(traced=False)
    alone = assign(facts.costs, 1, {}, 0)
    first = memory_of_rank(facts, alone, config(bf16=True), Mesh(1, 1, 1), [0], 1, "adamw")
    assert first.masters_bytes == 4 * 50
    assert first.optimizer_bytes == 2 * (400 + 4 * 50 + 28)
    assert first.gradients_bytes == 400 + 100 + 28
    assert first.total_bytes == 648 + 528 + 200 + 1256 + 200
    traced = replace(first, activations_bytes=1000)
    assert traced.total_bytes == first.total_bytes - 200 + 1000


def test_bytes_are_split_by_dtype() -> None:
    assert memory(APART)[0].dtypes == {"bfloat16": 100, "float32": 548}
    assert memory(APART)[0].num_parameters == 187


def test_a_tied_parameter_counts_once_on_each_of_its_ranks() -> None:
    assert [each.parameters_bytes for each in memory(TOGETHER)] == [428, 248]
    assert [each.num_parameters for each in memory(APART)] == [187, 107]


def test_what_several_ranks_hold_is_reduced_in_buffers() -> None:
    assert [each.reduction_bytes for each in memory(APART)] == [428, 428]  # the tied one and the loose one
    assert [each.reduction_bytes for each in memory(TOGETHER)] == [28, 28]
    assert [each.reduction_bytes for each in memory(TOGETHER, replicated=True)] == [428, 128]


def test_unknown_activations_are_not_zero() -> None:
    first, _ = memory(APART, traced=False)
    assert first.activations_bytes is None
    assert first.total_bytes == 648 + 528 + 1056 + 428


def test_json_gives_the_same_model() -> None:
    assert ModelFacts.from_json(model().to_json()) == model()


def test_torchs_optimizers_keep_as_much_as_we_say() -> None:
    torch = pytest.importorskip("torch")
    makers = {
        "sgd": torch.optim.SGD,
        "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    assert makers.keys() == OPTIMIZERS.keys()
    for name, maker in makers.items():
        parameter = torch.nn.Parameter(torch.zeros(1000))
        optimizer = maker([parameter])
        parameter.grad = torch.ones(1000)
        optimizer.step()
        kept = [each for each in optimizer.state[parameter].values() if isinstance(each, torch.Tensor)]
        assert sum(each.numel() for each in kept) // 1000 == OPTIMIZERS[name]


def test_parts_over_replicas_are_padded_and_two_blocks_are_gathered_at_a_time() -> None:
    tensors = {name: replace(tensor(name, 50), rows=5) for name in "abc"}
    units = tuple(UnitFacts(UnitCost(name, 200, 1), (name,)) for name in tensors)
    facts = ModelFacts("Net", units, tensors, (), traced=False, blocks=(("a",), ("b",), ("c",)))
    one = assign(facts.costs, 1, {}, 0)
    sharded = config(sharded_data_parallel_degree=2, sdp_param_persistence_threshold=0)
    rank = memory_of_rank(facts, one, sharded, Mesh(1, 1, 2), [0], 1, "adamw")
    assert rank.parameters_bytes == 3 * 4 * 30  # three rows of five
    assert rank.gathered_bytes == 2 * 200


def test_states_of_what_two_pipeline_ranks_hold_are_on_both() -> None:
    facts = model(traced=False)
    places = assign(facts.costs, 2, APART, 0)
    sharded = config(shard_optimizer_state=True)
    first, last = (
        memory_of_rank(facts, places, sharded, Mesh(2, 1, 2), [stage, 2 + stage], 1, "adamw") for stage in (0, 1)
    )
    assert first.optimizer_bytes == 2 * (400 + 28 + 100)
    assert last.optimizer_bytes == 2 * (400 + 28)
