"""Pieces of parameters, and the record of each: who holds, averages, updates, counts and saves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.plan.mesh import CommGroup
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import TpShard, join_shards, mark, take_shard
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks

PP = {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0}
TP = {"tensor_parallel_degree": 2}

_FACTS = (
    *("pp_ranks", "holders", "state_holders", "replica_ranks", "reduce_ranks", "grad_scale", "owner"),
    *("is_here", "is_tp_shard", "is_owned_here", "is_counted_here"),
)
Records = dict[str, dict[str, Any]]


class Layers(nn.Module):
    """Two layers, over a pipeline on both ranks, whose weight is one; the first may be divided, the last is frozen."""

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.divided = nn.Sequential(smp.nn.DistributedLinear(4, 4))
            self.first = nn.Linear(4, 4)
        with smp.partition(1):
            self.second = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4).requires_grad_(False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))  # of no layer: on all ranks
        if smp.tp_size() > 1:  # whole, and every tensor-parallel rank has seen the samples of all
            mark(self.scale, TpShard((4,), None, (), smp.tp_rank(), smp.tp_size(), CommGroup.RDP_GROUP, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.second(self.first(self.divided(x)))) * self.scale).sum()


@smp.step
def layers_step(model: Any, x: Tensor) -> None:
    model.backward(model(x))


def records_of(config: dict[str, Any]) -> tuple[int, int, Records, Records]:
    """Return this rank's pipeline rank and replica, and the facts of each parameter before and after a step."""
    smp.init({"ddp": True, **config})
    model = smp.DistributedModel(Layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = facts(model)
    layers_step(model, torch.ones(4, 4))
    optimizer.step()
    return state.pp_rank, state.rdp_rank, before, facts(model)


def facts(model: smp.DistributedModel) -> Records:
    return {each.name: {key: getattr(each, key) for key in _FACTS} for each in model.placement}


KINDS = [
    pytest.param(1, {}, id="one rank"),
    pytest.param(2, PP, id="pp2"),
    pytest.param(2, TP, id="tp2"),
    pytest.param(2, {"ddp": False}, id="two jobs in one"),
    pytest.param(4, {**PP, "shard_optimizer_state": True}, id="pp2 dp2, sharded state"),
    pytest.param(4, {**TP, "shard_optimizer_state": True}, id="tp2 dp2, sharded state"),
    pytest.param(4, {**PP, **TP}, id="pp2 tp2"),
    pytest.param(4, {"sharded_data_parallel_degree": 2}, id="two sharding groups"),
]


@pytest.mark.parametrize(("size", "config"), KINDS)
def test_ranks_agree_on_every_parameter(size: int, config: dict[str, Any]) -> None:
    ranks = run_ranks(records_of, size, config)
    sharded = config.get("shard_optimizer_state") or config.get("sharded_data_parallel_degree")
    for name in ranks[0][3]:
        seen = {rank: records[name] for rank, (_, _, _, records) in enumerate(ranks)}
        here = {rank for rank, each in seen.items() if each["is_here"]}
        assert here == {rank for rank, (pp_rank, *_) in enumerate(ranks) if pp_rank in seen[rank]["pp_ranks"]}
        for rank in here:
            if "ddp" in config:
                assert seen[rank]["replica_ranks"] == seen[rank]["reduce_ranks"] == (rank,), "not kept equal"
            elif "sharded_data_parallel_degree" not in config:
                assert set(seen[rank]["replica_ranks"]) == seen[rank]["holders"], "all that are to be equal"
            for key in ("holders", "replica_ranks", "reduce_ranks"):
                assert rank in seen[rank][key]
                assert set(seen[rank][key]) <= here
                assert all(seen[other][key] == seen[rank][key] for other in seen[rank][key]), "groups, not just ranks"
            assert seen[rank]["is_owned_here"] == (rank in seen[rank]["state_holders"])
            if seen[rank]["owner"] is not None:
                assert seen[rank]["state_holders"] == {seen[rank]["owner"]} <= set(seen[rank]["reduce_ranks"])
        # Of what is divided each part counts once, of the rest the whole: over all ranks where replicas have parts of
        # the gradients, else in each replica.
        parts = len({each["holders"] for rank, each in seen.items() if rank in here}) if "ddp" not in config else 1
        for replica in {0} if sharded else {rdp_rank for _, rdp_rank, *_ in ranks}:
            of_replica = [rank for rank in here if sharded or ranks[rank][1] == replica]
            assert sum(seen[rank]["is_counted_here"] for rank in of_replica) == parts, name


def test_a_weight_on_both_pipeline_ranks_is_averaged_over_all_and_summed_over_two() -> None:
    *_, before, after = run_ranks(records_of, 4, {**PP})[0]
    assert {name: sorted(each["pp_ranks"]) for name, each in after.items()} == {
        "scale": [0, 1],
        "divided.0.weight": [0],
        "divided.0.bias": [0],
        "first.weight": [0, 1],
        "first.bias": [0],
        "second.bias": [1],
        "last.weight": [1],
        "last.bias": [1],
    }
    assert after["first.weight"]["reduce_ranks"] == (0, 1, 2, 3)
    assert after["first.weight"]["grad_scale"] == 2
    assert len(after["first.bias"]["reduce_ranks"]) == 2
    assert all(each["pp_ranks"] == {0, 1} and each["is_owned_here"] for each in before.values()), "not partitioned yet"


def test_owners_share_trained_and_frozen_parameters_alike() -> None:
    *_, records = run_ranks(records_of, 2, {"shard_optimizer_state": True})[0]
    assert {records[name]["owner"] for name in ("first.weight", "divided.0.weight")} == {0, 1}
    assert {records[name]["owner"] for name in ("last.weight", "last.bias")} == {0, 1}


@on_ranks(2)
def test_what_is_not_of_the_model_is_each_ranks_own() -> None:
    smp.init({**PP})
    model, rank = smp.DistributedModel(Layers()), smp.rank()
    other = model.placement.of(nn.Parameter(torch.ones(1)))
    assert (set(other.pp_ranks), other.is_counted_here) == ({0, 1}, rank == 0)
    layers_step(model, torch.ones(4, 4))
    other = model.placement.of(nn.Parameter(torch.ones(1)))
    assert (set(other.pp_ranks), other.is_counted_here) == ({rank}, True)


WHOLE = TpShard((6, 4), None, (), 0, 2, CommGroup.RDP_GROUP, 0.5)


def taken_and_joined(shape: tuple[int, int], dim: int | None, parts: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the shapes of both ranks' pieces, after a check that they make the whole."""
    whole = torch.arange(24.0)[: shape[0] * shape[1]].view(shape)
    shards = [replace(WHOLE, shape=shape, dim=dim, parts=parts, tp_rank=rank) for rank in range(2)]
    pieces = [take_shard(whole, shard) for shard in shards]
    assert torch.equal(join_shards(pieces, shards[0]), whole)
    assert [tuple(piece.shape) for piece in pieces] == [shard.local_shape for shard in shards]
    return [shard.local_shape for shard in shards]


@pytest.mark.parametrize(("dim", "parts"), [(None, ()), (0, ()), (1, ()), (0, (2, 2, 2)), (0, (4, 2))])
def test_join_is_the_reverse_of_take(dim: int | None, parts: tuple[int, ...]) -> None:
    taken_and_joined((6, 4), dim, parts)


def test_the_last_piece_of_an_uneven_dimension_is_shorter() -> None:
    assert taken_and_joined((5, 2), 0) == [(3, 2), (2, 2)]


def test_packed_pieces_are_divided_one_by_one() -> None:
    whole = torch.arange(6.0)
    shard = TpShard((6,), 0, (4, 2), 1, 2, CommGroup.RDP_GROUP, 0.5)
    assert take_shard(whole, shard).tolist() == [2, 3, 5]
