from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smpkit.plan.mesh import CommGroup
from smpkit.torch.placement.shards import TpShard, join_shards, mark, shard_of, take_shard

WHOLE = TpShard((6, 4), None, (), 0, 2, CommGroup.RDP_GROUP, 0.5)


@pytest.mark.parametrize(("dim", "parts"), [(None, ()), (0, ()), (1, ()), (0, (2, 2, 2)), (0, (4, 2))])
def test_join_is_the_reverse_of_take(dim: int | None, parts: tuple[int, ...]) -> None:
    whole = torch.arange(24.0).view(6, 4)
    shards = [replace(WHOLE, dim=dim, parts=parts, tp_rank=rank) for rank in range(2)]
    pieces = [take_shard(whole, shard) for shard in shards]
    assert torch.equal(join_shards(pieces, shards[0]), whole)


def test_the_last_piece_of_an_uneven_dimension_is_shorter() -> None:
    whole = torch.arange(10.0).view(5, 2)
    shards = [replace(WHOLE, shape=(5, 2), dim=0, tp_rank=rank) for rank in range(2)]
    pieces = [take_shard(whole, shard) for shard in shards]
    assert [tuple(piece.shape) for piece in pieces] == [shard.local_shape for shard in shards] == [(3, 2), (2, 2)]
    assert torch.equal(join_shards(pieces, shards[0]), whole)


def test_packed_pieces_are_divided_one_by_one() -> None:
    whole = torch.arange(6.0)
    shard = TpShard((6,), 0, (4, 2), 1, 2, CommGroup.RDP_GROUP, 0.5)
    assert take_shard(whole, shard).tolist() == [2, 3, 5]


def test_a_parameter_tells_what_was_written_on_it() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert shard_of(parameter) is None
    mark(parameter, WHOLE)
    assert shard_of(parameter) is WHOLE
    assert not WHOLE.is_distributed
    assert WHOLE.sees_scaled_batch
