"""What autograd saves while a slice runs: nothing if it will run again, else all but the weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from smpkit.errors import UsageError
from smpkit.torch.offload_model.activation_offload import OffloadedTensor
from smpkit.torch.offload_model.engine import Modes, Slice, SliceEngine
from smpkit.torch.offload_model.rng_and_autocast import AutocastState, RandomState, random_state, restored_random_state
from smpkit.torch.offload_model.values import JoinSpec, Structure, flatten, join, join_gradients, split

__all__ = ["Run", "discarding", "without_weights"]


class _BufferOwner(Protocol):
    def buffer(self, index: int) -> Tensor: ...


@dataclass(frozen=True)
class _Weight:
    """A part of the buffer in which a slice's weights lie whenever its backward runs."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def discarding() -> saved_tensors_hooks:
    """Save nothing: the graph is only made to see which outputs have a gradient, and as the plain model makes it."""
    return _untraced(lambda _: None, _no_backward)


def _no_backward(_: None) -> Tensor:
    raise AssertionError("backward through the forward that is run again")


def without_weights(device_weights: _BufferOwner, index: int) -> saved_tensors_hooks:
    """Save where weights are instead of weights: their memory is another slice's by the time of the backward.

    Everything else goes to the hooks that are active outside (which torch would pass over), or stays as it is.
    """
    storage = device_weights.buffer(index).untyped_storage().data_ptr()
    outer_pack, outer_unpack = _outer_hooks()

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() == storage:
            return _Weight(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return outer_pack(tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _Weight):
            flat = device_weights.buffer(index).view(packed.dtype)
            return flat.as_strided(packed.shape, packed.stride, packed.offset)
        return outer_unpack(packed)

    return _untraced(pack, unpack)


def _untraced(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
    """Return hooks that torch.compile leaves alone where a compiled layer calls them: it would trace each as code."""
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and asking would import it
        disable: Any = torch.compiler.disable
        pack, unpack = disable(pack), disable(unpack)
    return saved_tensors_hooks(pack, unpack)


def _outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None else (_same, _same)


def _same(value: Any) -> Any:
    return value


# --- One forward of an OffloadModel, and its backward -----------------------------------------------------------------
# All microbatches pass a slice before the next slice is needed. With checkpointing only the slices' inputs are kept, on
# the host, and backward runs each slice again; without, the graphs stay on the device, but not the weights in them::
#
#     slice       0 0 0 1 1 1 2 2 2 | 2 2 2 1 1 1 0 0 0      forward | backward, three microbatches each
#     loads       1     2           |       0
#     gradients                     |       2     1     0


_ON_DEVICE: Final = 2  # microbatches whose boundary tensors may wait on the device for the next slice


@dataclass
class _Boundary:
    """What goes from one slice to the next, of one microbatch."""

    structure: Structure
    tensors: list[OffloadedTensor]
    owned: list[OffloadedTensor]
    """Those that no earlier slice's boundary has; what slices hand on unchanged is offloaded once."""


@dataclass
class _Piece:
    """One slice's work on one microbatch, as far as backward needs it."""

    inputs: _Boundary
    modes: Modes = ()
    random: RandomState | None = None
    buffers: dict[int, Tensor] = field(default_factory=dict)
    graph: tuple[list[Tensor], list[Tensor]] | None = None
    """Inputs and outputs, where the graph is kept."""


class Run:
    """One forward and what its backward needs.

    Args:
        engine: of the model.
        structure: of (args, kwargs).
        training: whether a backward may follow.
    """

    def __init__(self, engine: SliceEngine, structure: Structure, *, training: bool) -> None:
        self.outputs: Structure
        """Of what the model returns; known after `forward`."""
        self._engine = engine
        self._structure = structure
        self._training = training
        self._recompute = training and engine.checkpoint
        self._autocast = AutocastState.current(engine.device)
        self._pieces: list[list[_Piece]] = []
        self._keeps_graph = training and not engine.checkpoint
        self._count = 1
        self._joined: list[JoinSpec] = []
        self._rows: list[list[int | None]] = []

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """Return the output tensors of all microbatches, joined, and which of them have a gradient."""
        engine = self._engine
        parts = split(inputs, engine.num_microbatches)
        self._count = len(parts)
        self._rows = [
            [None if part is whole else part.shape[0] for part in column]
            for whole, column in zip(inputs, zip(*parts, strict=True), strict=True)
        ]
        boundaries = [self._inputs_of(part) for part in parts]
        for number, column in enumerate(zip(*[each.tensors for each in boundaries], strict=True)):
            for offloaded in [column] if self._rows[number][0] is None else zip(column, strict=True):
                engine.offloader.copy_input(offloaded)
        last = len(engine.slices) - 1
        engine.device_weights.begin_forward()
        for index in range(last + 1):
            with engine.on_device(index, fresh=True, next_index=index + 1 if index < last else None):
                boundaries = self._forward_slice(index, boundaries)
        if engine.consumer is None:  # else what writes weights waits for the copies that read them
            engine.device_weights.wait_for_loads()
        self.outputs = boundaries[0].structure
        joined = join(
            [[engine.offloader.take(offloaded) for offloaded in each.tensors] for each in boundaries],
            [[offloaded.shared for offloaded in each.tensors] for each in boundaries],
            [max((rows for rows in part if rows is not None), default=1) for part in zip(*self._rows, strict=True)],
        )
        self._joined = [how for _, how in joined]
        return [tensor for tensor, _ in joined], [offloaded.requires_grad for offloaded in boundaries[0].tensors]

    def backward(
        self,
        inputs: Sequence[Tensor],
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        *,
        keep: bool,
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the input tensors and of the parameters.

        Args:
            inputs: what `forward` got.
            parameters: of the model, in the order in which their gradients are wanted.
            gradients: of the output tensors.
            keep: whether another backward may follow.
        """
        engine = self._engine
        columns = [joined.split(gradient) for joined, gradient in zip(self._joined, gradients, strict=True)]
        boundary_gradients = [[_offloaded(column[part]) for column in columns] for part in range(self._count)]
        if engine.consumer is None:  # the parameters keep all of them
            engine.gradients.reserve()
        engine.gradients.prepare()
        gradient_copies = []
        for index in reversed(range(len(engine.slices))):
            with engine.on_device(index, fresh=False, next_index=index - 1 if index else None) as device_parameters:
                engine.gradients.begin(index, device_parameters)
                boundary_gradients = self._backward_slice(index, boundary_gradients, keep=keep)
                gradient_copies.append(engine.gradients.send(index, device_parameters))
            if (consumer := engine.consumer) is not None:
                consumer.consume(gradient_copies.pop())
        rows = zip(*[[self._take(offloaded) for offloaded in row] for row in boundary_gradients], strict=True)
        joined = [join_gradients(*each) for each in zip(inputs, rows, self._rows, strict=True)]
        if not keep:
            self._pieces.clear()
        if engine.consumer is None:  # else the consumer changes weights, after their gradients
            engine.device_weights.wait_for_loads()
        return joined, engine.gradients.wait_by_parameter(gradient_copies, parameters)

    def _inputs_of(self, part: Sequence[Tensor]) -> _Boundary:
        tensors = [
            OffloadedTensor(
                tensor.detach(),
                requires_grad=tensor.requires_grad,
                is_input=True,
                shared=number if rows[0] is None else None,
            )
            for number, (tensor, rows) in enumerate(zip(part, self._rows, strict=True))
        ]
        return _Boundary(self._structure, tensors, [])

    def _fetch(self, boundaries: Sequence[_Boundary], number: int) -> None:
        """Start to bring back what the next microbatch needs."""
        if number < len(boundaries):
            for offloaded in boundaries[number].tensors:
                self._engine.offloader.fetch(offloaded)

    def _forward_slice(self, index: int, boundaries: Sequence[_Boundary]) -> list[_Boundary]:
        outgoing = []
        pieces: list[_Piece] = []
        for number, boundary in enumerate(boundaries):
            self._fetch(boundaries, number)
            self._fetch(boundaries, number + 1)
            piece = _Piece(boundary)
            outgoing.append(self._forward_piece(index, piece))
            pieces.append(piece)
        if self._training:
            self._pieces.append(pieces)
        return outgoing

    def _forward_piece(self, index: int, piece: _Piece) -> _Boundary:
        engine, boundary = self._engine, piece.inputs
        tensors = [engine.offloader.take(offloaded) for offloaded in boundary.tensors]
        if not self._training:
            if self._count > 1:  # what a slice changes in place, other microbatches must get unchanged
                alone = [offloaded.shared is None or offloaded.user_input is None for offloaded in boundary.tensors]
                tensors = [each if own else each.clone() for each, own in zip(tensors, alone, strict=True)]
            versions = _versions(tensors)
            with self._autocast.restore():
                value = engine.call(index, boundary.structure.fill(tensors))
            # What the slice has changed in place must not come from the host again, where it is unchanged.
            changed = versions is None or versions != _versions(tensors)
            return self._outgoing(index, boundary, tensors, value, changed=changed)
        for tensor, offloaded in zip(tensors, boundary.tensors, strict=True):
            tensor.requires_grad_(offloaded.requires_grad)
        if not self._recompute:
            with without_weights(engine.device_weights, index):
                passed_in, value, changed = self._call(index, boundary, tensors)
            piece.graph = (tensors, flatten(value)[0])
        else:
            piece.modes, piece.random = engine.slices[index].modes, random_state(engine.device)
            with discarding(), engine.slices[index].buffers.snapshot(piece.buffers):
                passed_in, value, changed = self._call(index, boundary, tensors)
        return self._outgoing(index, boundary, passed_in, value, changed=changed)

    def _call(self, index: int, boundary: _Boundary, tensors: list[Tensor]) -> tuple[list[Tensor], Any, bool]:
        """Run a slice with a graph; return what went in, what came out, and whether what went in was changed."""
        piece = self._engine.slices[index]
        with torch.enable_grad(), self._autocast.restore():
            modes = piece.modes
            expected = piece.overwrites_input.get(modes)
            passed_in = tensors if expected is False else [tensor.clone() for tensor in tensors]
            versions = [tensor._version for tensor in passed_in]
            value = self._engine.call(index, boundary.structure.fill(passed_in))
        overwritten = any(tensor._version != version for tensor, version in zip(passed_in, versions, strict=True))
        self._note_overwrites(index, piece, modes, overwritten=overwritten)
        return passed_in, value, overwritten

    def _note_overwrites(self, index: int, piece: Slice, modes: Modes, *, overwritten: bool) -> None:
        """Remember whether a slice changes its input in place, which backward needs unchanged."""
        if overwritten and piece.overwrites_input.get(modes) is False:
            raise UsageError(
                f"slice {index} changed its input in place, which it had not done before, so the input is lost",
                hint="let its first layer do so always or never (ReLU(inplace=True) in only one branch?)",
            )
        piece.overwrites_input[modes] = piece.overwrites_input.get(modes, False) or overwritten

    def _outgoing(
        self, index: int, inputs: _Boundary, passed_in: Sequence[Tensor], value: Any, *, changed: bool
    ) -> _Boundary:
        """Make the boundary behind a slice, and start its way to the host if it is to wait there."""
        engine = self._engine
        known = {id(tensor): offloaded for tensor, offloaded in zip(passed_in, inputs.tensors, strict=True)}
        outputs, structure = flatten(value)
        tensors, owned = [], []
        for output in outputs:
            same = known.get(id(output))
            if same is not None and not changed:
                offloaded = same
            else:  # an input that comes out changed is a new tensor to the slices behind
                # A weight that is itself an output would be overwritten by the next slice but one.
                kept = output.detach().clone() if engine.device_weights.holds(output) else output.detach()
                offloaded = OffloadedTensor(
                    kept, requires_grad=output.requires_grad, shared=same.shared if same else None
                )
                owned.append(offloaded)
            tensors.append(offloaded)
        if index + 1 < len(engine.slices):
            self._send(owned, always=self._recompute)
        return _Boundary(structure, tensors, owned)

    def _send(self, owned: Sequence[OffloadedTensor], *, always: bool) -> None:
        """Send tensors to the host: those that backward needs always, others when they would wait for many others."""
        few = self._count <= _ON_DEVICE
        if always or (not few and not self._keeps_graph):
            for offloaded in owned:
                self._engine.offloader.send(offloaded, keep=few)

    def _backward_slice(
        self, index: int, boundary_gradients: list[list[OffloadedTensor | None]], *, keep: bool
    ) -> list[list[OffloadedTensor | None]]:
        pieces, results = self._pieces[index], []
        for number, (piece, gradients) in enumerate(zip(pieces, boundary_gradients, strict=True)):
            for ahead in (number, number + 1):
                self._fetch([each.inputs for each in pieces], ahead)
            results.append(self._backward_piece(index, piece, gradients, keep=keep))
        return results

    def _backward_piece(
        self, index: int, piece: _Piece, gradients: Sequence[OffloadedTensor | None], *, keep: bool
    ) -> list[OffloadedTensor | None]:
        """Return the gradients of the slice's inputs; those of its weights are added to the device parameters'."""
        engine = self._engine
        arrived = [self._take(offloaded) for offloaded in gradients]
        with self._restored(index, piece) if self._recompute else contextlib.nullcontext():
            inputs, outputs = piece.graph or self._rerun(index, piece)
            roots = [
                (output, gradient)
                for output, gradient in zip(outputs, arrived, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if roots:
                ends, starts = zip(*roots, strict=True)
                torch.autograd.backward(ends, starts, retain_graph=keep and piece.graph is not None)
        found = [_offloaded(tensor.grad) for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None  # a kept graph may be gone through again
        if not keep:
            piece.graph = None
            for offloaded in piece.inputs.owned:
                engine.offloader.release(offloaded)
        if index:
            self._send([offloaded for offloaded in found if offloaded is not None], always=False)
        return found

    @contextlib.contextmanager
    def _restored(self, index: int, piece: _Piece) -> Iterator[None]:
        """Let a slice be as it was before its forward."""
        running = self._engine.slices[index]
        with running.with_modes(piece.modes), running.buffers.restored(piece.buffers):
            yield

    def _rerun(self, index: int, piece: _Piece) -> tuple[list[Tensor], list[Tensor]]:
        """Run a slice again as the first time, with a graph; return the tensors that went in and came out."""
        engine, boundary = self._engine, piece.inputs
        assert piece.random is not None
        tensors = [engine.offloader.take(offloaded) for offloaded in boundary.tensors]
        for tensor, offloaded in zip(tensors, boundary.tensors, strict=True):
            tensor.requires_grad_(offloaded.requires_grad)
        with torch.enable_grad(), self._autocast.restore(), restored_random_state(piece.random, engine.device):
            overwrites = engine.slices[index].overwrites_input.get(piece.modes, True)
            passed_in = [tensor.clone() for tensor in tensors] if overwrites else tensors
            value = engine.call(index, boundary.structure.fill(passed_in))
        return tensors, flatten(value)[0]

    def _take(self, offloaded: OffloadedTensor | None) -> Tensor | None:
        if offloaded is None:
            return None
        tensor = self._engine.offloader.take(offloaded)
        self._engine.offloader.release(offloaded)
        return tensor


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return how often tensors have been changed in place; None where torch does not count."""
    return None if any(tensor.is_inference() for tensor in tensors) else [tensor._version for tensor in tensors]


def _offloaded(gradient: Tensor | None) -> OffloadedTensor | None:
    return None if gradient is None else OffloadedTensor(gradient, requires_grad=False)
