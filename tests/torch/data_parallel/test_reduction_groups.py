"""Each parameter is equal on the ranks that hold it, and what differs between ranks is named.

Gradients, averaged over the right ranks with the right scale: tests/transparency/test_tensor_parallel.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.plan.mesh import CommGroup
from smpkit.testing.ranks import RankFailed
from smpkit.torch.placement.shards import TpShard, mark
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks

TP = 2


class Kinds(nn.Module):
    """One parameter of each kind."""

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


@on_ranks(4)
def test_ranks_start_with_the_values_of_the_first_that_holds_the_same() -> None:
    # placement DPT: global rank = 2 * rdp_rank + tp_rank
    smp.init({"ddp": True, "tensor_parallel_degree": TP})
    module = Kinds(smp.tp_rank())
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            value.fill_(smp.rank() + 1.0)
    smp.DistributedModel(module)
    wholes, pieces = ("ordinary", "scaled", "partial", "whole_buffer"), ("piece", "frozen", "piece_buffer")
    expected = {**dict.fromkeys(wholes, 1.0), **dict.fromkeys(pieces, smp.rank() % TP + 1.0)}
    held = [*module.named_parameters(), *module.named_buffers()]
    assert {name: float(value.flatten()[0]) for name, value in held} == expected


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
