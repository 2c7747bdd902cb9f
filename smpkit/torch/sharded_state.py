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
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from smpkit.torch.buckets import Route
from smpkit.torch.deadline import waiting
from smpkit.torch.holders import Held

__all__ = ["StateShards"]

_CHUNK_BYTES = 25 * 1024 * 1024
_CHUNKS_IN_FLIGHT = 4  # bounds the memory that packing needs


class StateShards:
    """Who owns which parameter.

    Args:
        held: this rank's parameters; the same on all ranks that hold the same.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = list(held)
        self._owners = _deal(self._held)
        groups = {id(each.parameter): each.averaged for each in self._held}
        self._mine = {id_ for id_, owner in self._owners.items() if owner == dist.get_rank(groups[id_])}

    def route_of(self, held: Held) -> Route:
        """Return where a parameter's gradient goes."""
        return Route(held.averaged, self._owners.get(id(held.parameter)))

    def owns(self, parameter: torch.Tensor) -> bool:
        """Tell whether this rank keeps the optimizer state of a parameter that it holds."""
        return id(parameter) in self._mine or id(parameter) not in self._owners

    def divides(self, parameter: torch.Tensor) -> bool:
        """Tell whether several ranks share the states of parameters like this one."""
        return id(parameter) in self._owners

    @contextlib.contextmanager
    def only_owned(self) -> Iterator[None]:
        """Hide gradients of parameters that others own, or the optimizer would make states for them."""
        hidden = [(each.parameter, each.parameter.grad) for each in self._held if not self.owns(each.parameter)]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    @torch.no_grad()
    def spread(self) -> None:
        """Give the owners' values to all that hold the parameters; every rank calls this, after a step."""
        flying: deque[_Flight] = deque()
        for chunk in self._chunks():
            if len(flying) == _CHUNKS_IN_FLIGHT:
                flying.popleft().land()
            flying.append(_Flight.start(chunk, self.route_of(chunk[0])))
        for flight in flying:
            flight.land()

    def _chunks(self) -> list[list[Held]]:
        """Return parameters that travel together, the same in the same order on all ranks that hold them."""
        chunks: list[list[Held]] = []
        filled: dict[object, tuple[list[Held], int]] = {}
        for each in self._held:
            route = self.route_of(each)
            if route.owner is None or not each.parameter.requires_grad:
                continue
            key = (route, each.parameter.dtype, each.parameter.device)
            size = each.parameter.numel() * each.parameter.element_size()
            chunk, used = filled.get(key, ([], 0))
            if not chunk or used + size > _CHUNK_BYTES:
                chunk, used = [], 0
                chunks.append(chunk)
            chunk.append(each)
            filled[key] = (chunk, used + size)
        return chunks


@dataclass
class _Flight:
    """Parameters on their way from their owner."""

    chunk: list[Held]
    route: Route
    packed: torch.Tensor
    work: dist.Work

    @classmethod
    def start(cls, chunk: list[Held], route: Route) -> _Flight:
        assert route.group is not None
        assert route.owner is not None
        if route.owner == dist.get_rank(route.group):
            packed = torch.cat([each.parameter.detach().reshape(-1) for each in chunk])
        else:
            packed = chunk[0].parameter.new_empty(sum(each.parameter.numel() for each in chunk))
        work = dist.broadcast(packed, group=route.group, group_src=route.owner, async_op=True)
        assert work is not None
        return cls(chunk, route, packed, work)

    def land(self) -> None:
        assert self.route.group is not None
        with waiting("the updated parameters of another rank", self.route.group):
            self.work.wait()
        if self.route.owner == dist.get_rank(self.route.group):
            return
        pieces = torch.split(self.packed, [each.parameter.numel() for each in self.chunk])
        for each, piece in zip(self.chunk, pieces, strict=True):
            each.parameter.copy_(piece.view(each.parameter.shape))


def _deal(held: Sequence[Held]) -> dict[int, int]:
    """Return who owns each parameter, as an index in the group that averages it.

    The largest first, each to whom has least: no rank then owns more than the mean and one parameter. Frozen parameters
    are dealt out by themselves, or they would leave those that have a state to few ranks.
    """
    owners: dict[int, int] = {}
    loads: dict[tuple[dist.ProcessGroup, bool], list[int]] = {}
    for each in sorted(held, key=lambda each: each.parameter.numel() * each.parameter.element_size(), reverse=True):
        if each.averaged is None:
            continue
        key = (each.averaged, each.parameter.requires_grad)
        load = loads.setdefault(key, [0] * dist.get_world_size(each.averaged))
        owner = load.index(min(load))
        load[owner] += each.parameter.numel() * each.parameter.element_size()
        owners[id(each.parameter)] = owner
    return owners
