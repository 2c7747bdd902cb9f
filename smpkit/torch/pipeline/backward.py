"""What a microbatch leaves for backward on this rank, segment by segment, and the backward itself.

A value made in one segment and used in a later one is detached there: its gradient, that of a leaf, becomes a
root of the segment that made it. So no graph is walked twice and no autograd node ever waits for another rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from smpkit.errors import UsageError
from smpkit.torch.pipeline.message_order import P2PTransfer
from smpkit.torch.pipeline.split_backward import WeightBackward, backward_inputs
from smpkit.torch.pipeline.transport import Transport

__all__ = ["BackwardWork"]

_unsafe_view: Final = torch.ops.aten._unsafe_view.default
_PYTHON: Final[Any] = torch._C._FunctionBase
"""Nodes of Functions written in Python: whoever holds such a node does not hold its graph."""


@dataclass(slots=True)
class _SegmentState:
    """What the forward of one segment leaves for its backward."""

    losses: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    sends: list[tuple[GradientEdge | None, P2PTransfer]] = field(default_factory=list)
    receives: list[tuple[torch.Tensor, P2PTransfer]] = field(default_factory=list)
    cuts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    mutable: list[tuple[torch.Tensor, P2PTransfer]] = field(default_factory=list)
    """Aliases of received values that the segment may change in place."""


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
        self._segments: defaultdict[int, _SegmentState] = defaultdict(_SegmentState)
        self._cut_leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._weight_backwards: dict[int, WeightBackward] = {}

    @property
    def has_weight_backwards(self) -> bool:
        """Whether gradients of weights are left to make."""
        return bool(self._weight_backwards)

    def error_context(self, segment: int) -> dict[str, str]:
        """Return which modules a segment has run, for the notes of an error."""
        units = self.units.get(segment)
        if not units:
            return {}
        return {"module": f"`{units[0]}`"} if len(units) == 1 else {"modules": f"`{units[0]}` to `{units[-1]}`"}

    # --- what forward leaves -------------------------------------------------------------------------------------

    def add_root(self, root: torch.Tensor, gradient: torch.Tensor | None, segment: int) -> None:
        """Add a root of the backward of a segment."""
        self._segments[segment].losses.append((root, gradient))

    def add_send(self, value: torch.Tensor, transfer: P2PTransfer, segment: int) -> None:
        """Add a value that a segment has sent: its gradient will be received."""
        # Keep the GradientEdge, not the tensor, so that the activation can be freed after the send.
        edge = _edge_of(value) if value.requires_grad else None
        self._segments[segment].sends.append((edge, transfer))

    def add_receive(
        self, value: torch.Tensor, transfer: P2PTransfer, segment: int, *, is_mutable: bool
    ) -> torch.Tensor:
        """Add a received value, whose gradient must be sent back; return it as the segment may use it.

        Args:
            is_mutable: it may be changed in place, which neither a leaf nor a view of one allows.
        """
        leaf = value.requires_grad_()
        self._segments[segment].receives.append((leaf, transfer))
        if not is_mutable:
            return leaf
        # To autograd this is no view. Nobody else has these data, so the version counter need not be shared.
        result: torch.Tensor = _unsafe_view(leaf, leaf.shape)
        # Dimensions of size 1 may have arbitrary strides: `_unsafe_view` would change the output spec.
        result = result if result.stride() == leaf.stride() else _mutable_alias(leaf)
        self._segments[segment].mutable.append((result, transfer))
        return result

    def make_mutable(self, value: torch.Tensor, segment: int) -> torch.Tensor:
        """Return a value that is already in use as one that may be changed in place."""
        return _mutable_alias(value) if self.is_received(value, segment) else value

    def is_received(self, value: torch.Tensor, segment: int) -> bool:
        """Return whether a value is a leaf that was received."""
        return any(leaf is value for leaf, _ in self._segments[segment].receives)

    def cut(self, source: torch.Tensor, made_in: int, segment: int) -> torch.Tensor:
        """Return what an earlier segment made as a leaf of this one, the same each time."""
        key = (id(source), segment)
        if key not in self._cut_leaves:
            leaf = source.detach().requires_grad_()
            self._cut_leaves[key] = (source, leaf)  # holds the source, so that its id is not given away
            self._segments[made_in].cuts.append((source, leaf))
        return _mutable_alias(self._cut_leaves[key][1])

    # --- backward ------------------------------------------------------------------------------------------------

    def run(self, segment: int, split: bool) -> None:
        """Run backward through one segment: receive the gradients of what left it, send those of what came in.

        Args:
            split: leave the gradients of weights to `run_weights`, where that is possible.
        """
        self.done.add(segment)
        state = self._segments.pop(segment, None)
        if state is None:
            return
        _refuse_detached([*state.receives, *state.mutable])
        transport, index = self._transport, self._index
        roots: list[Any] = []
        gradients: list[torch.Tensor | None] = []
        matches = True
        for root, start in state.losses:
            roots.append(root)
            gradients.append(start)
            matches = matches and _matches_root(start, root)
        for edge, transfer in state.sends:
            gradient = transport.receive_gradient(index, transfer)
            if edge is not None and gradient is not None:
                roots.append(edge)
                gradients.append(gradient)
        for source, leaf in state.cuts:
            if leaf.grad is not None:
                roots.append(source)
                gradients.append(leaf.grad)
                matches = matches and _matches_root(leaf.grad, source)
        receives = state.receives
        if roots and split:
            inputs = [*(leaf for leaf, _ in receives), *self._cut_leaves_of(segment)]
            weight_backward = backward_inputs(roots, gradients, inputs)
            if weight_backward is not None:
                self._weight_backwards[segment] = weight_backward
        elif roots and matches:
            # What torch.autograd.backward comes to: its checks of every root take longer than a small graph.
            _engine_run_backward(
                tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        elif roots:
            torch.autograd.backward(roots, gradients)
        for leaf, transfer in receives:
            gradient = leaf.grad
            if gradient is not None and gradient.untyped_storage().nbytes() > transfer.spec.num_bytes:
                # A part of the gradient of a `cat`, say, whose other parts may be gradients of weights: adding to those
                # would look like a change of this one on its way.
                gradient = gradient.clone()
            transport.send_gradient(gradient, index, transfer)

    def run_weights(self, segment: int) -> None:
        """Run what a split backward through a segment has left; nothing if that was all of it."""
        weight_backward = self._weight_backwards.pop(segment, None)
        if weight_backward is not None:
            weight_backward.run()

    def release(self) -> None:
        """Let go of everything that is kept for backward."""
        self._segments.clear()
        self._cut_leaves.clear()
        self._weight_backwards.clear()
        self.units.clear()

    def _cut_leaves_of(self, segment: int) -> list[torch.Tensor]:
        """Return the leaves by which a segment uses what earlier ones made."""
        return [leaf for (_, user), (_, leaf) in self._cut_leaves.items() if user == segment]


def _refuse_detached(received: list[tuple[torch.Tensor, P2PTransfer]]) -> None:
    """Raise if what came in was cut off here: a leaf loses its gradient, and where it came from nobody knows."""
    for value, transfer in received:
        if not value.requires_grad:
            raise UsageError(
                f"{transfer.spec}, which pipeline rank {transfer.source} made for `{transfer.consumer}`, was detached"
                f" in place or frozen there: rank {transfer.source} does not know that it gets no gradient",
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


def _matches_root(gradient: torch.Tensor | None, root: torch.Tensor) -> bool:
    """Return whether a backward may start there without the checks, and the hook for subclasses, of torch's own."""
    if gradient is None or type(root) is not torch.Tensor:
        return False
    return gradient.dtype is root.dtype and gradient.shape == root.shape


class _MutableAlias(torch.autograd.Function):
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


def _mutable_alias(leaf: torch.Tensor) -> torch.Tensor:
    # mark_dirty bumps the version counter although nothing has changed: graphs and pending sends that hold these data
    # would report an in-place change.
    with torch.autograd._unsafe_preserve_version_counter(leaf):  # type: ignore[attr-defined]
        result: torch.Tensor = _MutableAlias.apply(leaf, leaf.detach())  # type: ignore[no-untyped-call]
    return result
