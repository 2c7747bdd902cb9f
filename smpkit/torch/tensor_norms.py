"""The norm of each tensor of a list, of which ranks may hold pieces (tensor parallelism) or parts (sharding)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from smpkit.plan.mesh import CommGroup
from smpkit.torch.deadline import waiting
from smpkit.torch.sharded_tensors import is_dtensor
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.shards import shard_of

__all__ = ["norms_of"]


def norms_of(tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of each tensor, which is what this rank holds of something shaped like a parameter.

    Of pieces and parts, that of the whole; all ranks call this.
    """
    filled = [each if each.numel() else each.new_zeros(1) for each in tensors]  # nothing has no largest value
    norms = torch.stack(list(torch._foreach_norm(filled, norm_type)))
    squares = norm_type == 2.0
    for group, divided in _sharded_over(parameters):
        whole = norms.square() if squares else norms.clone()
        with waiting("the norms of divided tensors", group):
            dist.all_reduce(whole, op=dist.ReduceOp.SUM if squares else dist.ReduceOp.MAX, group=group)
        norms = torch.where(torch.tensor(divided, device=norms.device), whole.sqrt() if squares else whole, norms)
    return norms


def _sharded_over(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[dist.ProcessGroup, list[bool]]]:
    """Yield the groups of ranks that hold tensors together, and which tensors: first what was divided last."""
    dtensors = [is_dtensor(each) for each in parameters]
    mesh = next((each.device_mesh for each in parameters if is_dtensor(each)), None)
    if mesh is not None:
        yield mesh.get_group("shard"), dtensors
    tp_shards = [(shard := shard_of(each)) is not None and shard.is_distributed for each in parameters]
    if state.initialized and state.tp_size > 1 and any(tp_shards):
        yield state.process_group(CommGroup.TP_GROUP), tp_shards
