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

from torch import nn

from smpkit.torch.data_parallel.reducer import GradientReducer, ReduceTarget
from smpkit.torch.data_parallel.replicas import Source, broadcast_tensors
from smpkit.torch.placement.placement import ParameterPlacement


def reduce_target_of(placement: ParameterPlacement) -> ReduceTarget:
    """Return where a parameter's gradient goes."""
    assert placement.reduce_group is not None, f"the gradient of {placement.name} is not reduced"
    owner = None if placement.owner is None else placement.reduce_ranks.index(placement.owner)
    return ReduceTarget(placement.reduce_group, owner, may_overlap=len(placement.pp_ranks) == 1)


class Zero1Partition:
    """Lets the owner of each parameter alone update it, and gives the result to the others.

    The placements of this rank's parameters come in the same order on all ranks that hold the same.
    """

    def __init__(self, placements: Iterable[ParameterPlacement], reducer: GradientReducer) -> None:
        self._unowned: list[nn.Parameter] = []
        self._sources: list[tuple[nn.Parameter, Source]] = []
        """Where the new values of each parameter come from."""
        self._reducer = reducer
        for placed in placements:
            if placed.owner is None or placed.reduce_group is None:
                continue
            if not placed.is_owned_here:
                self._unowned.append(placed.parameter)
            self._sources.append((placed.parameter, (placed.reduce_group, placed.reduce_ranks.index(placed.owner))))

    @contextlib.contextmanager
    def hide_unowned_gradients(self) -> Iterator[None]:
        """Hide gradients of parameters that others own: the optimizer would make states for them."""
        hidden = [(parameter, parameter.grad) for parameter in self._unowned]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def broadcast_updated(self) -> None:
        """Broadcast each updated parameter from its owner; every rank calls this, after a step."""
        # An optimizer moves on what has been trained while it is frozen, if `grad` is 0.
        trained = self._reducer.trained
        updated = [(parameter, source) for parameter, source in self._sources if parameter in trained]
        broadcast_tensors(updated, "the updated parameters of another rank")
