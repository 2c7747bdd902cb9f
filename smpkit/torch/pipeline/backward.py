"""What a microbatch leaves for backward on this rank, segment by segment, and the backward itself.

A value made in one segment and used in a later one is cut off its graph there: a detached leaf whose gradient becomes a
root of the segment that made it. So no graph is walked twice and no autograd node ever waits for another rank.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smpkit.torch.pipeline.halves import WeightHalf, backward_inputs
from smpkit.torch.pipeline.record import Move
from smpkit.torch.pipeline.transport import Transport

__all__ = ["BackwardWork"]

_unsafe_view: Final = torch.ops.aten._unsafe_view.default


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
        self._losses: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = defaultdict(list)
        self._departures: defaultdict[int, list[tuple[GradientEdge | None, Move]]] = defaultdict(list)
        self._arrivals: defaultdict[int, list[tuple[torch.Tensor, Move]]] = defaultdict(list)
        self._cuts: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
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
        self._losses[segment].append((root, gradient))

    def departs(self, value: torch.Tensor, move: Move, segment: int) -> None:
        """Note that a value which a segment made left, so that its gradient will come back."""
        # Not the value itself: when it has arrived, and backward did not keep it, its memory is free.
        edge = get_gradient_edge(value) if value.requires_grad else None
        self._departures[segment].append((edge, move))

    def arrives(self, value: torch.Tensor, move: Move, segment: int) -> torch.Tensor:
        """Note that a value came in, whose gradient must go back; return it as the segment may use it."""
        leaf = value.requires_grad_()
        self._arrivals[segment].append((leaf, move))
        # Modules may change their inputs in place, which neither a leaf nor a view of one allows. This is no view to
        # autograd; nobody else has these data, so nobody need be told of changes.
        result: torch.Tensor = _unsafe_view(leaf, leaf.shape)
        return result

    def cut(self, source: torch.Tensor, made_in: int, segment: int) -> torch.Tensor:
        """Return what an earlier segment made as a leaf of this one, the same each time."""
        key = (id(source), segment)
        if key not in self._cut_leaves:
            leaf = source.detach().requires_grad_()
            self._cut_leaves[key] = (source, leaf)  # holds the source, so that its id is not given away
            self._cuts[made_in].append((source, leaf))
        return _usable(self._cut_leaves[key][1])

    # --- backward ------------------------------------------------------------------------------------------------

    def run(self, segment: int, split: bool) -> None:
        """Run backward through one segment: receive the gradients of what left it, send those of what came in.

        Args:
            split: leave the gradients of weights to `run_weights`, where that is possible.
        """
        self.done.add(segment)
        transport, index = self._transport, self._index
        roots: list[Any] = []
        gradients: list[torch.Tensor | None] = []
        for root, start in self._losses.pop(segment, ()):
            roots.append(root)
            gradients.append(start)
        for edge, move in self._departures.pop(segment, ()):
            gradient = transport.receive_gradient(index, move)
            if edge is not None:
                roots.append(edge)
                gradients.append(gradient)
        for source, leaf in self._cuts.pop(segment, ()):
            if leaf.grad is not None:
                roots.append(source)
                gradients.append(leaf.grad)
        arrivals = self._arrivals.pop(segment, ())
        if roots and split:
            inputs = [*(leaf for leaf, _ in arrivals), *self._cut_leaves_of(segment)]
            half = backward_inputs(roots, gradients, inputs)
            if half is not None:
                self._weight_halves[segment] = half
        elif roots:
            torch.autograd.backward(roots, gradients)
        for leaf, move in arrivals:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if gradient.untyped_storage().nbytes() > gradient.nbytes:
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
        for kept in (
            self._losses,
            self._departures,
            self._arrivals,
            self._cuts,
            self._cut_leaves,
            self._weight_halves,
            self.units,
        ):
            if kept:
                kept.clear()

    def _cut_leaves_of(self, segment: int) -> list[torch.Tensor]:
        """Return the leaves by which a segment uses what earlier ones made."""
        return [leaf for (_, user), (_, leaf) in self._cut_leaves.items() if user == segment]


class _Handed(torch.autograd.Function):
    """Gives the data of a leaf to a graph in which they may be changed in place, as modules change their inputs.

    Neither a leaf nor a view of one may be; what a Function says it has changed in place is neither, and no copy. The
    count of changes stays that of the data, so that a graph which has saved them finds out.
    """

    @staticmethod
    def forward(ctx: Any, _leaf: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(data)
        return data

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _usable(leaf: torch.Tensor) -> torch.Tensor:
    # Nothing has changed yet: what others keep of these data (a graph, a message on its way) must not be told so.
    with torch.autograd._unsafe_preserve_version_counter(leaf):  # type: ignore[attr-defined]
        result: torch.Tensor = _Handed.apply(leaf, leaf.detach())  # type: ignore[no-untyped-call]
    return result
