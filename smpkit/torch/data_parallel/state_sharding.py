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
from typing import Any

from torch import nn

from smpkit.torch.data_parallel.buckets import ReduceTarget, kind_of
from smpkit.torch.data_parallel.replicas import Messages, Source, broadcast_messages, messages_of
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
        self._unowned: list[nn.Parameter] = []
        self._parameters: list[nn.Parameter] = []
        self._sources: list[Source] = []
        """Of each parameter, where its new values come from."""
        for each in placements:
            if each.owner is not None and each.reduce_group is not None:
                self._parameters.append(each.parameter)
                self._sources.append((each.reduce_group, each.reduce_ranks.index(each.owner)))
                if not each.is_owned_here:
                    self._unowned.append(each.parameter)
        self._kinds: list[Any] = []
        self._messages: Messages = ()

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
        kinds = list(map(kind_of, self._parameters))
        if kinds != self._kinds:  # parameters were frozen, unfrozen, cast or moved
            self._kinds = kinds
            self._messages = messages_of(
                (parameter, source)
                for parameter, source in zip(self._parameters, self._sources, strict=True)
                if parameter.requires_grad
            )
        broadcast_messages(self._messages, "the updated parameters of another rank")
