"""What a microbatch leaves for backward on this rank, segment by segment, and the backward itself.

A value made in one segment and used in a later one is cut off its graph there: a detached leaf whose gradient becomes a
root of the segment that made it. So no graph is walked twice and no autograd node ever waits for another rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from smpkit.errors import UsageError
from smpkit.torch.pipeline.halves import WeightHalf, backward_inputs
from smpkit.torch.pipeline.record import Move
from smpkit.torch.pipeline.transport import Transport

__all__ = ["BackwardWork"]

_unsafe_view: Final = torch.ops.aten._unsafe_view.default
_PYTHON: Final[Any] = torch._C._FunctionBase
"""Nodes of Functions written in Python: whoever holds such a node does not hold its graph."""


@dataclass(slots=True)
class _Left:
    """What the forward of one segment leaves."""

    losses: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    departures: list[tuple[GradientEdge | None, Move]] = field(default_factory=list)
    arrivals: list[tuple[torch.Tensor, Move]] = field(default_factory=list)
    cuts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    changeable: list[tuple[torch.Tensor, Move]] = field(default_factory=list)
    """What arrivals were handed on as, where they may be changed in place."""


class BackwardWork:
    """The backward of one microbatch on this rank.

    Args:
        transport: brings the gradients of what left, and takes those of what came in.
        index: which microbatch of the step.
    """

    def __init__(self, transport: Transport, index: int) -> None:
        self.done: set[int] = set()
        """Segments whose backward has run, as far as other ranks wait for it."""
        self.units: defaultdict[int, list[str]] = defaultdict(list)
        """The units that each segment has run, for errors."""
        self._transport = transport
        self._index = index
        self._left: defaultdict[int, _Left] = defaultdict(_Left)
        self._cut_leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._weight_halves: dict[int, WeightHalf] = {}

    @property
    def has_halves(self) -> bool:
        """Whether gradients of weights are left to make."""
        return bool(self._weight_halves)

    def place_of(self, segment: int) -> dict[str, str]:
        """Return where in the model a backward of a segment is, as an error names it."""
        units = self.units.get(segment)
        if not units:
            return {}
        return {"module": f"`{units[0]}`"} if len(units) == 1 else {"modules": f"`{units[0]}` to `{units[-1]}`"}

    # --- what forward leaves -------------------------------------------------------------------------------------

    def starts(self, root: torch.Tensor, gradient: torch.Tensor | None, segment: int) -> None:
        """Note that the backward of a segment starts at `root`."""
        self._left[segment].losses.append((root, gradient))

    def departs(self, value: torch.Tensor, move: Move, segment: int) -> None:
        """Note that a value which a segment made left, so that its gradient will come back."""
        # Not the value itself: when it has arrived, and backward did not keep it, its memory is free.
        edge = _edge_of(value) if value.requires_grad else None
        self._left[segment].departures.append((edge, move))

    def arrives(self, value: torch.Tensor, move: Move, segment: int, *, may_change: bool) -> torch.Tensor:
        """Note that a value came in, whose gradient must go back; return it as the segment may use it.

        Args:
            may_change: it may be changed in place, which neither a leaf nor a view of one allows.
        """
        leaf = value.requires_grad_()
        self._left[segment].arrivals.append((leaf, move))
        if not may_change:
            return leaf
        # This is no view to autograd; nobody else has these data, so nobody need be told of changes.
        result: torch.Tensor = _unsafe_view(leaf, leaf.shape)
        # Where dimensions of one element have other steps in it, a layer that returns it would return another spec.
        result = result if result.stride() == leaf.stride() else _usable(leaf)
        self._left[segment].changeable.append((result, move))
        return result

    def changeable(self, value: torch.Tensor, segment: int) -> torch.Tensor:
        """Return a value that is in use already so that it may be changed in place after all."""
        return _usable(value) if self.has_arrived(value, segment) else value

    def has_arrived(self, value: torch.Tensor, segment: int) -> bool:
        """Return whether a value is a leaf that came in."""
        return any(leaf is value for leaf, _ in self._left[segment].arrivals)

    def cut(self, source: torch.Tensor, made_in: int, segment: int) -> torch.Tensor:
        """Return what an earlier segment made as a leaf of this one, the same each time."""
        key = (id(source), segment)
        if key not in self._cut_leaves:
            leaf = source.detach().requires_grad_()
            self._cut_leaves[key] = (source, leaf)  # holds the source, so that its id is not given away
            self._left[made_in].cuts.append((source, leaf))
        return _usable(self._cut_leaves[key][1])

    # --- backward ------------------------------------------------------------------------------------------------

    def run(self, segment: int, split: bool) -> None:
        """Run backward through one segment: receive the gradients of what left it, send those of what came in.

        Args:
            split: leave the gradients of weights to `run_weights`, where that is possible.
        """
        self.done.add(segment)
        left = self._left.pop(segment, None)
        if left is None:
            return
        _refuse_detached([*left.arrivals, *left.changeable])
        transport, index = self._transport, self._index
        roots: list[Any] = []
        gradients: list[torch.Tensor | None] = []
        fit = True
        for root, start in left.losses:
            roots.append(root)
            gradients.append(start)
            fit = fit and _fits(start, root)
        for edge, move in left.departures:
            gradient = transport.receive_gradient(index, move)
            if edge is not None and gradient is not None:
                roots.append(edge)
                gradients.append(gradient)
        for source, leaf in left.cuts:
            if leaf.grad is not None:
                roots.append(source)
                gradients.append(leaf.grad)
                fit = fit and _fits(leaf.grad, source)
        arrivals = left.arrivals
        if roots and split:
            inputs = [*(leaf for leaf, _ in arrivals), *self._cut_leaves_of(segment)]
            half = backward_inputs(roots, gradients, inputs)
            if half is not None:
                self._weight_halves[segment] = half
        elif roots and fit:
            # What torch.autograd.backward comes to: its checks of every root take longer than a small graph.
            _engine_run_backward(
                tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        elif roots:
            torch.autograd.backward(roots, gradients)
        for leaf, move in arrivals:
            gradient = leaf.grad
            if gradient is not None and gradient.untyped_storage().nbytes() > move.spec.num_bytes:
                # A part of the gradient of a `cat`, say, whose other parts may be gradients of weights: adding to those
                # would look like a change of this one on its way.
                gradient = gradient.clone()
            transport.send_gradient(gradient, index, move)

    def run_weights(self, segment: int) -> None:
        """Run what a split backward through a segment has left; nothing if that was all of it."""
        half = self._weight_halves.pop(segment, None)
        if half is not None:
            half.run()

    def release(self) -> None:
        """Let go of everything that is kept for backward."""
        self._left.clear()
        self._cut_leaves.clear()
        self._weight_halves.clear()
        self.units.clear()

    def _cut_leaves_of(self, segment: int) -> list[torch.Tensor]:
        """Return the leaves by which a segment uses what earlier ones made."""
        return [leaf for (_, user), (_, leaf) in self._cut_leaves.items() if user == segment]


def _refuse_detached(arrived: list[tuple[torch.Tensor, Move]]) -> None:
    """Raise if what came in was cut off here: a leaf loses its gradient, and where it came from nobody knows."""
    for value, move in arrived:
        if not value.requires_grad:
            raise UsageError(
                f"{move.spec}, which pipeline rank {move.source} made for `{move.unit}`, was detached in place or"
                f" frozen there: rank {move.source} does not know that it gets no gradient",
                hint="write `x = x.detach()` instead of `x.detach_()` or `x.requires_grad_(False)`",
            )


def _edge_of(value: torch.Tensor) -> GradientEdge:
    """Return where the gradient of a value goes in; holds the graph."""
    node = value.grad_fn
    if node is None:
        return get_gradient_edge(value)
    if isinstance(node, _PYTHON):
        node = value.view_as(value).grad_fn  # what `get_gradient_edge` holds beside it
        return get_gradient_edge(value) if node is None else GradientEdge(node, 0)
    return GradientEdge(node, value.output_nr)


def _fits(gradient: torch.Tensor | None, root: torch.Tensor) -> bool:
    """Return whether a backward may start there without the checks, and the hook for subclasses, of torch's own."""
    if gradient is None or type(root) is not torch.Tensor:
        return False
    return gradient.dtype is root.dtype and gradient.shape == root.shape


class _Handed(torch.autograd.Function):
    """Gives the data of a leaf to a graph in which they may be changed in place, as modules change their inputs.

    Neither a leaf nor a view of one may be; what a Function says it has changed in place is neither, and no copy. The
    count of changes stays that of the data, so that a graph which has saved them finds out.
    """

    @staticmethod
    def forward(ctx: Any, _leaf: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(data)
        ctx.set_materialize_grads(False)  # where a user of the value makes no gradient, the value has none
        return data

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradient, None


def _usable(leaf: torch.Tensor) -> torch.Tensor:
    # Nothing has changed yet: what others keep of these data (a graph, a message on its way) must not be told so.
    with torch.autograd._unsafe_preserve_version_counter(leaf):  # type: ignore[attr-defined]
        result: torch.Tensor = _Handed.apply(leaf, leaf.detach())  # type: ignore[no-untyped-call]
    return result
