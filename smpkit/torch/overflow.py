"""Whether a gradient of the model is not finite on any of its ranks: all of them skip the step, or none does."""

from __future__ import annotations

import torch
import torch.distributed as dist

from smpkit.plan.mesh import CommGroup
from smpkit.torch.deadline import waiting
from smpkit.torch.state import state

__all__ = ["all_reduce_found_inf"]


def all_reduce_found_inf(found: torch.Tensor) -> torch.Tensor:
    """Return the largest `found` of all ranks that train the same weights; all of them call this.

    The gradients of replicas are equal once they are reduced, so the ranks of one model ask only each other; unless
    each replica has gradients of a part only, as with sharded states.
    """
    if not state.initialized:
        return found
    sharded = state.cfg.ddp and (state.cfg.shard_optimizer_state or state.cfg.sharded_data_parallel_degree > 1)
    kind = CommGroup.WORLD if sharded else CommGroup.MP_GROUP
    if len(state.group(kind)) > 1:
        group = state.process_group(kind)
        with waiting("the agreement whether all gradients are finite", group):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found
