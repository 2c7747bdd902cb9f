from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError, UsageError
from smpkit.plan import mesh as mesh_module
from smpkit.plan.mesh import CommGroup, Mesh

MP, DP, TP = CommGroup.MP_GROUP, CommGroup.DP_GROUP, CommGroup.TP_GROUP
PP, RDP, WORLD = CommGroup.PP_GROUP, CommGroup.RDP_GROUP, CommGroup.WORLD


def groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Read `02 13` as ((0, 2), (1, 3))."""
    return tuple(tuple(int(digit) for digit in word) for word in text.split())


# strategy, `pp tp rdp` of ranks 0..7, then the groups: PP, TP, RDP, MP, DP
EIGHT_RANKS = [
    ("DPT", "000 010 100 110 001 011 101 111", "02 13 46 57", "01 23 45 67", "04 15 26 37", "0123 4567", "0145 2367"),
    ("DTP", "000 100 010 110 001 101 011 111", "01 23 45 67", "02 13 46 57", "04 15 26 37", "0123 4567", "0246 1357"),
    ("PDT", "000 010 001 011 100 110 101 111", "04 15 26 37", "01 23 45 67", "02 13 46 57", "0145 2367", "0123 4567"),
    ("PTD", "000 001 010 011 100 101 110 111", "04 15 26 37", "02 13 46 57", "01 23 45 67", "0246 1357", "0123 4567"),
    ("TDP", "000 100 001 101 010 110 011 111", "01 23 45 67", "04 15 26 37", "02 13 46 57", "0145 2367", "0246 1357"),
    ("TPD", "000 001 100 101 010 011 110 111", "02 13 46 57", "04 15 26 37", "01 23 45 67", "0246 1357", "0145 2367"),
]


@pytest.mark.parametrize(
    ("strategy", "places", "pp", "tp", "rdp", "mp", "dp"), EIGHT_RANKS, ids=[r[0] for r in EIGHT_RANKS]
)
def test_eight_ranks_are_placed_as_documented(
    strategy: str, places: str, pp: str, tp: str, rdp: str, mp: str, dp: str
) -> None:
    mesh = Mesh(2, 2, 2, strategy)
    found = [mesh.coordinates(rank) for rank in range(8)]
    assert " ".join(f"{place.pp}{place.tp}{place.rdp}" for place in found) == places
    for kind, expected in ((PP, pp), (TP, tp), (RDP, rdp), (MP, mp), (DP, dp), (WORLD, "01234567")):
        assert set(mesh.groups(kind)) == set(groups(expected)), kind


def test_sixteen_ranks_are_placed_as_documented() -> None:
    mesh = Mesh(2, 4, 2)
    assert mesh.groups(TP) == tuple(tuple(range(first, first + 4)) for first in (0, 4, 8, 12))
    assert mesh.groups(PP)[:5] == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12))
    assert mesh.groups(RDP) == tuple((rank, rank + 8) for rank in range(8))
    assert mesh.groups(MP) == (tuple(range(8)), tuple(range(8, 16)))
    assert set(mesh.groups(DP)) == {(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)}


@pytest.mark.parametrize(
    ("partitions", "strategy", "mp", "dp"),
    [
        (2, "spread", "04 15 26 37", "0123 4567"),
        (2, "cluster", "01 23 45 67", "0246 1357"),
        (4, "spread", "0246 1357", None),
        (4, "cluster", "0123 4567", None),
    ],
    ids=["2-spread", "2-cluster", "4-spread", "4-cluster"],
)
def test_ranks_are_placed_as_documented_without_tensor_parallelism(
    partitions: int, strategy: str, mp: str, dp: str | None
) -> None:
    mesh = Mesh(partitions, 1, 8 // partitions, strategy)
    assert set(mesh.groups(MP)) == set(groups(mp))
    if dp is not None:
        assert set(mesh.groups(DP)) == set(groups(dp))


def test_the_aliases_are_the_strategies_they_stand_for() -> None:
    for alias, letters in (("cluster", "DPT"), ("spread", "TPD")):
        assert Mesh(2, 3, 2, alias).groups(TP) == Mesh(2, 3, 2, letters).groups(TP)
        assert Mesh(2, 3, 2, alias).groups(PP) == Mesh(2, 3, 2, letters).groups(PP)


STRATEGIES = ["cluster", "spread", *(row[0] for row in EIGHT_RANKS)]
meshes = st.builds(Mesh, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.sampled_from(STRATEGIES))


@given(meshes)
def test_groups_of_a_kind_have_one_size_and_partition_the_world_in_rank_order(mesh: Mesh) -> None:
    assert mesh.pp_size * mesh.dp_size == mesh.size
    sizes = {PP: mesh.pp_size, TP: mesh.tp_size, RDP: mesh.rdp_size, DP: mesh.dp_size, WORLD: mesh.size}
    for kind, size in {**sizes, MP: mesh.pp_size * mesh.tp_size}.items():
        found = mesh.groups(kind)
        assert {len(group) for group in found} == {size}
        assert sorted(rank for group in found for rank in group) == list(range(mesh.size))
        assert all(list(group) == sorted(group) for group in found)
        for rank in range(mesh.size):
            assert mesh.group(kind, rank)[mesh.index(kind, rank)] == rank
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(meshes)
def test_a_tensor_group_lies_within_its_model_and_its_data_group(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        assert set(mesh.group(TP, rank)) == set(mesh.group(MP, rank)) & set(mesh.group(DP, rank))


@pytest.mark.parametrize(("ranks", "pp", "tp"), [(6, 4, 1), (8, 3, 1), (2, 2, 2)])
def test_degrees_that_do_not_divide_the_world_are_a_config_error(ranks: int, pp: int, tp: int) -> None:
    config = ModelParallelConfig(pipeline_parallel_degree=pp, tensor_parallel_degree=tp, ddp=True)
    with pytest.raises(ConfigError, match="must divide the number of ranks"):
        Mesh.of(config, ranks)


def test_the_mesh_of_a_job_has_its_degrees_and_placement() -> None:
    config = ModelParallelConfig(pipeline_parallel_degree=2, placement_strategy="spread", ddp=True)
    assert Mesh.of(config, 8) == Mesh(2, 1, 4, "spread")


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_a_usage_error(rank: int) -> None:
    mesh = Mesh(2, 2, 2)
    for call in (mesh.coordinates, lambda rank: mesh.group(PP, rank), lambda rank: mesh.index(PP, rank)):
        with pytest.raises(UsageError, match=f"no rank {rank} in a world of 8"):
            call(rank)


def test_the_picture_in_the_docstring_is_what_draw_returns() -> None:
    drawn = Mesh(2, 2, 2).draw()
    documented = mesh_module.__doc__ or ""
    assert "\n".join(f"    {line}" for line in drawn.splitlines()) in documented


def test_a_wide_grid_stays_aligned() -> None:
    lines = Mesh(2, 16, 8).draw().splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    assert len(lines) == 2 + 8
