"""Each parameter is equal on the ranks that hold it, and its gradient averaged over the ranks that it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.plan.mesh import CommGroup
from smpkit.testing.ranks import RankFailed
from smpkit.torch.placement.shards import TpShard, mark
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks

TP = 2


class Kinds(nn.Module):
    """One parameter of each kind; the gradient of each is what forward is given for it."""

    def __init__(self, tp_rank: int) -> None:
        super().__init__()
        for name in ("ordinary", "piece", "scaled", "partial", "frozen"):
            self.register_parameter(name, nn.Parameter(torch.zeros(2, dtype=torch.float64)))

        def shard(dim: int | None, group: CommGroup, scale: float) -> TpShard:
            return TpShard((4,) if dim == 0 else (2,), dim, (), tp_rank, TP, group, scale)

        mark(self.get_parameter("piece"), shard(0, CommGroup.RDP_GROUP, 1 / TP))
        mark(self.get_parameter("scaled"), shard(None, CommGroup.RDP_GROUP, 1 / TP))
        mark(self.get_parameter("partial"), shard(None, CommGroup.DP_GROUP, TP))
        mark(self.get_parameter("frozen"), shard(0, CommGroup.RDP_GROUP, 1 / TP))
        self.get_parameter("frozen").requires_grad_(False)
        table = torch.full((2,), float(tp_rank), dtype=torch.float64)
        self.register_buffer("whole_buffer", table.clone())
        self.register_buffer("piece_buffer", table)
        mark(table, shard(0, CommGroup.RDP_GROUP, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return sum((weight * parameter).sum() for parameter in self.parameters())  # type: ignore[return-value]


def start(**options: Any) -> smp.DistributedModel:
    # placement DPT: global rank = 2 * rdp_rank + tp_rank
    config = {"ddp": True, "tensor_parallel_degree": TP, "microbatches": options.pop("microbatches", 1)}
    smp.init(config)
    module = Kinds(smp.tp_rank())
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            value.fill_(smp.rank() + 1.0)
    return smp.DistributedModel(module, **options)


@smp.step
def kinds_step(model: Any, weight: Tensor, backwards: int) -> None:
    for _ in range(backwards):
        model.backward(model(weight))


@on_ranks(4)
def test_ranks_start_with_the_values_of_the_first_that_holds_the_same() -> None:
    module = start().get_module()
    wholes, pieces = ("ordinary", "scaled", "partial", "whole_buffer"), ("piece", "frozen", "piece_buffer")
    expected = {**dict.fromkeys(wholes, 1.0), **dict.fromkeys(pieces, smp.rank() % TP + 1.0)}
    held = [*module.named_parameters(), *module.named_buffers()]
    assert {name: float(value.flatten()[0]) for name, value in held} == expected


def model_parameter_of(rank: int) -> Tensor:
    return torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1) ** 2


def train(microbatches: int, accumulation: int, backwards: int, overlap: bool) -> list[dict[str, Tensor | None]]:
    model = start(
        microbatches=microbatches,
        backward_passes_per_step=accumulation,
        overlapping_allreduce=overlap,
        bucket_cap_mb=0.00002,
    )
    seen = []
    batch = model_parameter_of(smp.rank()).expand(microbatches, 2)
    for turn in range(3):
        if turn < 2:  # the third adds to the second
            model.zero_grad()
        if turn == 1:
            model.module.get_parameter("frozen").requires_grad_(True)
        for _ in range(accumulation):
            kinds_step(model, batch, backwards)
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
    return seen


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("microbatches", "accumulation", "backwards", "overlap"),
    [(1, 1, 1, True), (2, 2, 1, True), (2, 1, 2, True), (1, 2, 2, False)],
)
def test_gradients_are_averaged_over_their_group_and_scaled_once(
    microbatches: int, accumulation: int, backwards: int, overlap: bool, size: int
) -> None:
    everyone = range(size)
    for rank, turns in enumerate(run_ranks(train, size, microbatches, accumulation, backwards, overlap)):
        replicas = [each for each in everyone if each % TP == rank % TP]
        over_dp = torch.stack([model_parameter_of(each) for each in everyone]).mean(0)
        over_rdp = torch.stack([model_parameter_of(each) for each in replicas]).mean(0)
        once = {"ordinary": over_dp, "piece": over_rdp / TP, "scaled": over_rdp / TP, "partial": over_dp * TP}
        once["frozen"] = once["piece"]
        times = accumulation * backwards  # the microbatches are averaged
        for turn, gradients in enumerate(turns):
            added = 2 if turn == 2 else 1
            wanted = {name: None if name == "frozen" and turn == 0 else once[name] * times * added for name in once}
            torch.testing.assert_close(gradients, wanted, rtol=1e-13, atol=0)


def differ(what: str) -> None:
    smp.init({"ddp": True, "tensor_parallel_degree": TP})
    module = Kinds(smp.tp_rank())
    if (smp.rank() == 3 and what == "piece") or (smp.rdp_rank() == 1 and what == "replica"):
        piece = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        mark(piece, TpShard((6,), 0, (), smp.tp_rank(), TP, CommGroup.RDP_GROUP, 1 / TP))
        module.register_parameter("piece", piece)
    if smp.rank() == 3 and what == "scale":
        mark(module.get_parameter("partial"), TpShard((2,), None, (), 1, TP, CommGroup.DP_GROUP, 1.0))
    smp.DistributedModel(module)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("piece", r"ranks 2 and 3 of a tensor-parallel group: `parameter piece \[4\] .*` against `.* \[6\]"),
        ("replica", r"data-parallel ranks 1 and 3: `parameter piece \(2,\).* against `parameter piece \(3,\)"),
        ("scale", r"ranks 0 and 3: .*x 2.*` against .*x 1\.0`"),
    ],
)
def test_different_pieces_and_scales_are_named(what: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_ranks(differ, 4, what)
