"""One forward of an OffloadModel, and its backward.

All microbatches pass a slice before the next slice is needed. With checkpointing only the slices' inputs are kept, on
the host, and backward runs each slice again. Without, the graphs stay on the device, but not the weights in them::

    slice       0 0 0 1 1 1 2 2 2 | 2 2 2 1 1 1 0 0 0      forward | backward, three microbatches each
    loads       1     2           |       0
    gradients                     |       2     1     0

What autograd saves while a slice runs is decided by the hooks at the end: nothing if the slice will run again
(`discarding`), else everything but the weights (`without_weights`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from smpkit.errors import UsageError
from smpkit.torch.core.buffers import Buffers, all_modules
from smpkit.torch.core.rng_and_autocast import AutocastState, RandomState
from smpkit.torch.core.tensor_spec import Structure, flatten
from smpkit.torch.offload_model.activation_offload import OffloadedTensor
from smpkit.torch.offload_model.engine import Modes, SliceEngine
from smpkit.torch.offload_model.values import JoinSpec, join, join_gradients, split
from smpkit.torch.offload_model.weights import DeviceWeights

__all__ = ["Run", "discarding", "without_weights"]

_ON_DEVICE: Final = 2
"""Up to this many microbatches may leave their boundary tensors on the device for the next slice."""


@dataclass
class _Boundary:
    """What one microbatch hands from one slice to the next."""

    structure: Structure
    tensors: list[OffloadedTensor]
    owned: list[OffloadedTensor]
    """Those that no earlier boundary has: a tensor that slices hand on unchanged is offloaded once."""


@dataclass
class _Piece:
    """What backward needs of one slice's forward of one microbatch."""

    inputs: _Boundary
    modes: Modes = ()
    random: RandomState | None = None
    buffers: Buffers | None = None
    graph: tuple[list[Tensor], list[Tensor]] | None = None
    """Inputs and outputs, if the graph is kept."""


class Run:
    """One forward and what its backward needs.

    Args:
        engine: of the model.
        structure: of (args, kwargs).
        training: whether a backward may follow.
    """

    def __init__(self, engine: SliceEngine, structure: Structure, *, training: bool) -> None:
        self.outputs: Structure
        """Structure of what the model returns; known after `forward`."""
        self._engine = engine
        self._structure = structure
        self._training = training
        self._recompute = training and engine.checkpoint
        # Without autocast's cache: it would keep a cast of every weight on the device until the end of the step, and
        # return it for the same device parameter after another slice's weights have been loaded.
        self._autocast = AutocastState([engine.device], cache_enabled=False)
        self._pieces: list[list[_Piece]] = []
        self._keeps_graph = training and not engine.checkpoint
        self._count = 1
        self._joined: list[JoinSpec] = []
        self._rows: list[list[int | None]] = []

    def alone(self) -> AbstractContextManager[None]:
        """Run inside; raises UsageError if another thread uses the model at present."""
        return self._engine.alone()

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """Return the output tensors of all microbatches, joined, and which of them have a gradient."""
        engine = self._engine
        parts = split(inputs, engine.num_microbatches)
        self._count = len(parts)
        # Rows of each input in each microbatch; None where every microbatch gets the whole input.
        self._rows = []
        for whole, column in zip(inputs, zip(*parts, strict=True), strict=True):
            self._rows.append([None if part is whole else part.shape[0] for part in column])
        boundaries = [self._inputs_of(part) for part in parts]
        for rows, copies in zip(self._rows, zip(*[each.tensors for each in boundaries], strict=True), strict=True):
            if rows[0] is None:
                engine.offloader.copy_input(copies)  # one copy that all microbatches share
            else:
                for offloaded in copies:
                    engine.offloader.copy_input([offloaded])
        last = len(engine.slices) - 1
        engine.device_weights.begin_forward()
        for index in range(last + 1):
            with engine.on_device(index, fresh=True, next_index=index + 1 if index < last else None):
                boundaries = self._forward_slice(index, boundaries)
        if engine.consumer is None:  # an OffloadOptimizer itself waits for the loads before it writes weights
            engine.device_weights.wait_for_loads()
        self.outputs = boundaries[0].structure
        batch_sizes = list[int]()
        for of_part in zip(*self._rows, strict=True):
            batch_sizes.append(max((rows for rows in of_part if rows is not None), default=1))
        joined = join(
            [[engine.offloader.take(offloaded) for offloaded in each.tensors] for each in boundaries],
            [[offloaded.shared for offloaded in each.tensors] for each in boundaries],
            batch_sizes,
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
            inputs: those of `forward`.
            parameters: of the model; their gradients are returned in this order.
            gradients: of the output tensors.
            keep: whether another backward may follow.
        """
        engine = self._engine
        columns = [joined.split(gradient) for joined, gradient in zip(self._joined, gradients, strict=True)]
        boundary_gradients = [[_offloaded(column[part]) for column in columns] for part in range(self._count)]
        if engine.consumer is None:  # the parameters' `.grad` hold all of them at once
            engine.gradients.reserve()
        engine.gradients.keeps_sparse = engine.consumer is None  # an OffloadOptimizer takes flat ones
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
        if engine.consumer is None:  # the user may change weights from now on; a consumer itself waits before it does
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

    def _fetch(self, tensors: Sequence[OffloadedTensor | None]) -> None:
        """Start to load tensors, unless they are on the device."""
        for offloaded in tensors:
            if offloaded is not None:
                self._engine.offloader.fetch(offloaded)

    def _forward_slice(self, index: int, boundaries: Sequence[_Boundary]) -> list[_Boundary]:
        outgoing: list[_Boundary] = []
        pieces: list[_Piece] = []
        for number, boundary in enumerate(boundaries):
            self._fetch(boundary.tensors)
            # Queued before this microbatch computes, so that the copy runs beside it.
            if number + 1 < len(boundaries):
                self._fetch(boundaries[number + 1].tensors)
            else:
                self._fetch_first(index, boundaries, outgoing)
            piece = _Piece(boundary)
            outgoing.append(self._forward_piece(index, piece))
            pieces.append(piece)
        self._engine.device_weights.collect_writes(index, runs_again=self._recompute)
        if self._training:
            self._pieces.append(pieces)
        return outgoing

    def _fetch_first(self, index: int, boundaries: Sequence[_Boundary], outgoing: Sequence[_Boundary]) -> None:
        """Start to load what is needed first after a slice's forward: by the next slice, or by backward."""
        if index + 1 < len(self._engine.slices):
            following = outgoing[:1]
        else:
            following = boundaries[:1] if self._recompute and len(boundaries) > 1 else []
        for each in following:
            self._fetch(each.tensors)

    def _forward_piece(self, index: int, piece: _Piece) -> _Boundary:
        engine, boundary = self._engine, piece.inputs
        tensors = [engine.offloader.take(offloaded) for offloaded in boundary.tensors]
        if not self._training:
            if (
                self._count > 1
            ):  # a slice that changes a shared input in place must not change it for other microbatches
                for number, offloaded in enumerate(boundary.tensors):
                    if offloaded.shared is not None and offloaded.user_input is not None:
                        tensors[number] = tensors[number].clone()
            versions = _versions(tensors)
            with self._autocast.restored():
                value = engine.call(index, boundary.structure.fill(tensors))
            # An input that the slice has changed in place must be offloaded anew: the host has the old values.
            changed = versions is None or versions != _versions(tensors)
            return self._outgoing(index, boundary, tensors, value, changed=changed)
        for tensor, offloaded in zip(tensors, boundary.tensors, strict=True):
            tensor.requires_grad_(offloaded.requires_grad)
        if not self._recompute:
            with without_weights(engine.device_weights, index):
                passed_in, value, changed = self._call(index, boundary, tensors)
            piece.graph = (tensors, flatten(value)[0])
        else:
            running = engine.slices[index]
            piece.modes, piece.random = running.modes, RandomState([engine.device])
            piece.buffers = Buffers(all_modules([running.shard.model_shard]))
            with discarding():
                passed_in, value, changed = self._call(index, boundary, tensors)
            piece.buffers.end_forward()
        return self._outgoing(index, boundary, passed_in, value, changed=changed)

    def _call(self, index: int, boundary: _Boundary, tensors: list[Tensor]) -> tuple[list[Tensor], Any, bool]:
        """Run a slice with a graph; return its inputs, its result, and whether it changed its inputs in place."""
        piece = self._engine.slices[index]
        with torch.enable_grad(), self._autocast.restored():
            modes = piece.modes
            expected = piece.overwrites_input.get(modes)
            # Clones until it is known that the slice leaves its inputs alone: backward needs them unchanged.
            passed_in = tensors if expected is False else [tensor.clone() for tensor in tensors]
            versions = [tensor._version for tensor in passed_in]
            value = self._engine.call(index, boundary.structure.fill(passed_in))
        overwritten = any(tensor._version != version for tensor, version in zip(passed_in, versions, strict=True))
        if overwritten and expected is False:
            raise UsageError(
                f"slice {index} changed its input in place, which it had not done before, so the input is lost",
                hint="let its first layer do so always or never (ReLU(inplace=True) in only one branch?)",
            )
        piece.overwrites_input[modes] = expected or overwritten
        return passed_in, value, overwritten

    def _outgoing(
        self, index: int, inputs: _Boundary, passed_in: Sequence[Tensor], value: Any, *, changed: bool
    ) -> _Boundary:
        """Return the boundary after a slice, and start to send it to the host if it has to wait there."""
        engine = self._engine
        known = {id(tensor): offloaded for tensor, offloaded in zip(passed_in, inputs.tensors, strict=True)}
        outputs, structure = flatten(value)
        tensors, owned = [], []
        for output in outputs:
            same = known.get(id(output))
            if same is not None and not changed:
                offloaded = same
            else:  # to the next slices, an input that was changed in place is a new tensor
                # Clone a weight that is itself an output: the slice after the next one overwrites the buffer.
                kept = output.detach().clone() if engine.device_weights.holds(output) else output.detach()
                offloaded = OffloadedTensor(
                    kept, requires_grad=output.requires_grad, shared=same.shared if same else None
                )
                owned.append(offloaded)
            tensors.append(offloaded)
        last = len(engine.slices) - 1
        if index < last:
            # Backward begins with the last slice: its only input is needed again at once.
            self._send(owned, always=self._recompute and not (index + 1 == last and self._count == 1))
        return _Boundary(structure, tensors, owned)

    def _send(self, owned: Sequence[OffloadedTensor], *, always: bool) -> None:
        """Send tensors to the host: always what backward needs, the rest if many microbatches come in between."""
        few = self._count <= _ON_DEVICE
        if always or (not few and not self._keeps_graph):
            for offloaded in owned:
                self._engine.offloader.send(offloaded, keep=few)

    def _backward_slice(
        self, index: int, boundary_gradients: list[list[OffloadedTensor | None]], *, keep: bool
    ) -> list[list[OffloadedTensor | None]]:
        pieces = self._pieces[index]
        results: list[list[OffloadedTensor | None]] = []
        for number, (piece, gradients) in enumerate(zip(pieces, boundary_gradients, strict=True)):
            self._fetch(gradients)
            self._fetch(piece.inputs.tensors)
            # Queued before this microbatch computes: what the next one needs, or the first one of the slice before.
            if number + 1 < len(pieces):
                self._fetch(boundary_gradients[number + 1])
                self._fetch(pieces[number + 1].inputs.tensors)
            elif index:
                self._fetch(results[0] if results else ())
                self._fetch(self._pieces[index - 1][0].inputs.tensors)
            results.append(self._backward_piece(index, piece, gradients, keep=keep))
        return results

    def _backward_piece(
        self, index: int, piece: _Piece, gradients: Sequence[OffloadedTensor | None], *, keep: bool
    ) -> list[OffloadedTensor | None]:
        """Return the gradients of the slice's inputs; those of its weights are added to the device parameters'."""
        engine = self._engine
        arrived = [self._take(offloaded) for offloaded in gradients]
        with contextlib.nullcontext() if piece.buffers is None else piece.buffers.restored():
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
            tensor.grad = None  # `retain_graph`: another backward must not add to it
        if not keep:
            piece.graph = None
            for offloaded in piece.inputs.owned:
                engine.offloader.release(offloaded)
        if index:
            self._send([offloaded for offloaded in found if offloaded is not None], always=False)
        return found

    def _rerun(self, index: int, piece: _Piece) -> tuple[list[Tensor], list[Tensor]]:
        """Run a slice again exactly as the first time, with a graph; return its input and output tensors."""
        engine, boundary = self._engine, piece.inputs
        assert piece.random is not None
        tensors = [engine.offloader.take(offloaded) for offloaded in boundary.tensors]
        for tensor, offloaded in zip(tensors, boundary.tensors, strict=True):
            tensor.requires_grad_(offloaded.requires_grad)
        with torch.enable_grad(), self._autocast.restored(), piece.random.restored():
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
    """Return the tensors' versions; None for inference tensors, which have none."""
    return None if any(tensor.is_inference() for tensor in tensors) else [tensor._version for tensor in tensors]


def _offloaded(gradient: Tensor | None) -> OffloadedTensor | None:
    return None if gradient is None else OffloadedTensor(gradient, requires_grad=False)


def discarding() -> saved_tensors_hooks:
    """Save nothing: the graph is recorded only to learn which outputs need a gradient."""
    return _untraced(lambda _: None, _no_backward)


def _no_backward(_: None) -> Tensor:
    raise AssertionError("backward through the forward that is run again")


def without_weights(device_weights: DeviceWeights, index: int) -> saved_tensors_hooks:
    """Save the position of a weight instead of the weight: by the time of backward, another slice has used its memory.

    Everything else goes to the hooks that are active outside, for torch calls only the innermost ones.
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


@dataclass(frozen=True)
class _Weight:
    """A view of the buffer in which a slice's weights lie whenever its backward runs."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _untraced(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
    """Return hooks that torch.compile does not trace when a compiled layer calls them."""
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and `disable` would import all of dynamo
        disable: Any = torch.compiler.disable
        pack, unpack = disable(pack), disable(unpack)
    return saved_tensors_hooks(pack, unpack)


def _outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks if hooks is not None else (_same, _same)


def _same(value: Any) -> Any:
    return value
