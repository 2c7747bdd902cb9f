"""`shard_optimizer_state`: each parameter's optimizer state on one of the ranks that hold the parameter, its owner.

::

    backward           gradients of a parameter ──reduce──► its owner; the other ranks drop theirs
    optimizer.step()   the owner updates; the others see no gradient, so they make no state
                       new values ──broadcast──► all that hold the parameter

Together that moves as many bytes as an all-reduce of gradients does. Parameters stay whole tensors with an owner each,
dealt out so that all ranks own about as many bytes; the user's optimizer keeps its parameter groups as they are, so
schedulers and settings per group need to know nothing of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from smpkit.torch.data_parallel.buckets import ReduceTarget
from smpkit.torch.data_parallel.replicas import broadcast_tensors
from smpkit.torch.placement.placement import ParameterPlacement

__all__ = ["Zero1Partition", "reduce_target_of"]


def reduce_target_of(placement: ParameterPlacement) -> ReduceTarget:
    """Return where a parameter's gradient goes."""
    owner = None if placement.owner is None else placement.reduce_ranks.index(placement.owner)
    return ReduceTarget(placement.reduce_group, owner)


class Zero1Partition:
    """Lets the owner of each parameter alone update it, and gives the result to the others.

    Args:
        placements: of this rank's parameters; in the same order on all ranks that hold the same.
    """

    def __init__(self, placements: Iterable[ParameterPlacement]) -> None:
        self._placements = [each for each in placements if each.owner is not None]

    @contextlib.contextmanager
    def hide_unowned_gradients(self) -> Iterator[None]:
        """Hide gradients of parameters that others own: the optimizer would make states for them."""
        hidden = [(each.parameter, each.parameter.grad) for each in self._placements if not each.is_owned_here]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def broadcast_updated(self) -> None:
        """Broadcast each updated parameter from its owner; every rank calls this, after a step."""
        broadcast_tensors(
            [
                (each.parameter, (group, each.reduce_ranks.index(owner)))
                for each in self._placements
                if (group := each.reduce_group) is not None
                and (owner := each.owner) is not None
                and each.parameter.requires_grad
            ],
            "the updated parameters of another rank",
        )
