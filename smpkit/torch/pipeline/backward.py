"""The backward of one microbatch on this rank, segment by segment.

A segment's graph begins at leaves and ends at roots (see [Note: segments] in `microbatch.py`)::

    leaves                                                roots
      received values --> gradients are sent back           losses
      cuts: values of earlier segments, detached            sent values <-- gradients are received
                                                            cuts that later segments have made of values of this one

A value made in one segment and used in a later one is detached there: the gradient of that leaf becomes a root of the
segment that made the value. So no graph is walked twice, and no autograd node ever waits for another rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from smpkit.errors import UsageError
from smpkit.torch.pipeline.messages import P2PTransfer, message_of
from smpkit.torch.pipeline.split_backward import WeightBackward, backward_inputs
from smpkit.torch.pipeline.transport import Transport

_run_backward: Final[Any] = torch.autograd.Variable._execution_engine.run_backward
_unsafe_view: Final = torch.ops.aten._unsafe_view.default
_PythonNode: Final[Any] = torch._C._FunctionBase
"""The class of nodes of Functions written in Python: holding one does not keep its graph alive."""


class _SegmentState:
    """What the forward of one segment leaves for its backward."""

    __slots__ = ("cut_leaves", "cuts", "losses", "receives", "sends")

    def __init__(self) -> None:
        self.losses: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.sends: list[tuple[GradientEdge | None, P2PTransfer]] = []
        self.receives: list[tuple[torch.Tensor, torch.Tensor, P2PTransfer]] = []
        """Received leaves, and the tensors that the segment uses in their place."""
        self.cuts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Values that later segments use, and their leaves there."""
        self.cut_leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id, values of earlier segments that this one uses, and their leaves here."""


class BackwardWork:
    """The backward of one microbatch on this rank."""

    def __init__(self, transport: Transport, index: int) -> None:
        self.done: set[int] = set()
        """Segments whose backward has run, as far as other ranks wait for it."""
        self.units: defaultdict[int, list[str]] = defaultdict(list)
        """The units that each segment has run, for errors."""
        self._transport = transport
        self._index = index
        self._segments: defaultdict[int, _SegmentState] = defaultdict(_SegmentState)
        self.weight_backwards: dict[int, WeightBackward] = {}
        """The weight halves that are left to run, by segment."""

    def error_context(self, segment: int) -> dict[str, str]:
        """Return which modules a segment has run, as notes for an error."""
        units = self.units.get(segment)
        if not units:
            return {}
        return {"module": f"`{units[0]}`"} if len(units) == 1 else {"modules": f"`{units[0]}` to `{units[-1]}`"}

    # --- what forward leaves -------------------------------------------------------------------------------------

    def add_root(self, root: torch.Tensor, gradient: torch.Tensor | None, segment: int) -> None:
        self._segments[segment].losses.append((root, gradient))

    def add_send(self, value: torch.Tensor, transfer: P2PTransfer) -> None:
        """Add a value that a segment has sent: its gradient will be received."""
        # Lifetime: keep the GradientEdge, not the tensor, so that the activation can be freed after the send.
        edge = _edge_of(value) if value.requires_grad else None
        self._segments[transfer.source_segment].sends.append((edge, transfer))

    def add_receive(self, value: torch.Tensor, transfer: P2PTransfer) -> torch.Tensor:
        """Add a received value, whose gradient must be sent back; return the tensor that the segment uses.

        That may be changed in place, which torch allows for neither a leaf nor a view of one.
        """
        leaf = value.requires_grad_()
        # Autograd does not count this as a view. Nobody else uses the data, so its version counter need not be shared.
        result: torch.Tensor = _unsafe_view(leaf, leaf.shape)
        if result.stride() != transfer.spec.stride or not result.requires_grad:
            # Dimensions of size 1 may have arbitrary strides: `_unsafe_view` would change the output spec. And under
            # no_grad the result has no graph, which code outside of the no_grad may need later.
            result = mutable_alias(leaf)
        self._segments[transfer.target_segment].receives.append((leaf, result, transfer))
        return result

    def cut(self, source: torch.Tensor, made_in: int, segment: int) -> torch.Tensor:
        """Return a value of an earlier segment as a leaf of this one, the same leaf each time."""
        leaves = self._segments[segment].cut_leaves
        if id(source) not in leaves:
            leaf = source.detach().requires_grad_()
            leaves[id(source)] = source, leaf  # with the source, so that no other tensor gets its id
            self._segments[made_in].cuts.append((source, leaf))
        return mutable_alias(leaves[id(source)][1])

    # --- backward ------------------------------------------------------------------------------------------------

    def run(self, segment: int, split: bool) -> None:
        """Run backward through one segment: receive the gradients of sent values, send those of received ones.

        Args:
            split: leave the gradients of weights to `run_weights`, where that is possible.
        """
        self.done.add(segment)
        state = self._segments.pop(segment, None)
        if state is None:
            return
        for _, used, transfer in state.receives:
            if not used.requires_grad:
                raise _detached_error(transfer)
        transport, index = self._transport, self._index
        roots: list[Any] = []
        gradients: list[torch.Tensor | None] = []
        for root, start in state.losses:
            roots.append(root)
            gradients.append(start)
        for edge, transfer in state.sends:
            gradient = transport.receive(message_of(index, transfer, True))
            if edge is not None and gradient is not None:
                roots.append(edge)
                gradients.append(gradient)
        for source, leaf in state.cuts:
            if leaf.grad is not None:
                roots.append(source)
                gradients.append(leaf.grad)
        if roots and split:
            self._run_split(segment, state, roots, gradients)
        elif roots:
            run_backward(roots, gradients)
        for leaf, _, transfer in state.receives:
            gradient = leaf.grad
            if gradient is not None and gradient.untyped_storage().nbytes() > transfer.spec.num_bytes:
                # It shares memory, as the parts of the gradient of a `cat` do. Other parts may be gradients of weights:
                # adding to those raises the version, and this gradient would seem to change while it travels.
                gradient = gradient.clone()
            transport.send(gradient, message_of(index, transfer, True))

    def _run_split(
        self, segment: int, state: _SegmentState, roots: list[Any], gradients: list[torch.Tensor | None]
    ) -> None:
        inputs = [leaf for leaf, _, _ in state.receives]
        inputs += [leaf for _, leaf in state.cut_leaves.values()]
        weight_backward = backward_inputs(roots, gradients, inputs)
        if weight_backward is not None:
            self.weight_backwards[segment] = weight_backward

    def run_weights(self, segment: int) -> None:
        """Run the weight half of a segment's backward, if that was split."""
        weight_backward = self.weight_backwards.pop(segment, None)
        if weight_backward is not None:
            weight_backward.run()

    def release(self) -> None:
        self._segments.clear()
        self.weight_backwards.clear()


def _detached_error(transfer: P2PTransfer) -> UsageError:
    """Return the error for a received value that was detached in place: its leaf has no gradient."""
    return UsageError(
        f"{transfer.spec}, which pipeline rank {transfer.source} made for `{transfer.consumer}`, was detached"
        f" in place or frozen there: rank {transfer.source} does not know that it gets no gradient",
        hint="write `x = x.detach()` instead of `x.detach_()` or `x.requires_grad_(False)`",
    )


def _edge_of(value: torch.Tensor) -> GradientEdge | None:
    """Return the edge where the gradient of a value enters its graph, and keep that graph alive."""
    node = value.grad_fn
    if node is None:
        # A view made under no_grad says that it needs a gradient, since its base does, but has no graph.
        return None if value._is_view() else get_gradient_edge(value)
    if isinstance(node, _PythonNode):
        # The node of a view keeps it alive. So does `get_gradient_edge`, which also keeps the activation.
        node = value.view_as(value).grad_fn
        return get_gradient_edge(value) if node is None else GradientEdge(node, 0)
    return tuple.__new__(GradientEdge, (node, value.output_nr))  # what its constructor does, without Python


def run_backward(roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor | None]) -> None:
    """Do what `torch.autograd.backward(roots, gradients)` does, where possible without its checks of every root.

    They take longer than a small graph. A subclass of Tensor may have hooks there.
    """
    for root, gradient in zip(roots, gradients, strict=True):
        if type(root) is GradientEdge:
            continue
        if (
            type(root) is not torch.Tensor
            or gradient is None
            or gradient.dtype is not root.dtype
            or gradient.shape != root.shape
        ):
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
            return
    _run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _MutableAlias(torch.autograd.Function):
    """Gives the data of a leaf to a graph in which they may be changed in place, as modules change their inputs.

    Torch allows that for neither a leaf nor a view of one. The result of a Function that marks its input dirty is
    neither, and no copy. It shares the version counter of the data, so that a graph which has saved them notices.
    """

    @staticmethod
    def forward(ctx: Any, _leaf: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(data)
        ctx.set_materialize_grads(False)  # keep a gradient of None as None, not zeros
        return data

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradient, None


def mutable_alias(leaf: torch.Tensor) -> torch.Tensor:
    # mark_dirty raises the version although nothing has changed: graphs and pending sends that hold these data would
    # report an in-place change.
    # Under no_grad, too, the value and views of it need gradients: so all ranks expect it.
    with torch.enable_grad(), torch.autograd._unsafe_preserve_version_counter(leaf):  # type: ignore[attr-defined]
        result: torch.Tensor = _MutableAlias.apply(leaf, leaf.detach())  # type: ignore[no-untyped-call]
    return result
