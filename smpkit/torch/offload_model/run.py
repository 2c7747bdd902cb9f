"""One forward of an OffloadModel, and its backward.

All microbatches pass a slice before the next slice is needed. With checkpointing only the slices' inputs are kept, on
the host, and backward runs each slice again; without, the graphs stay on the device, but not the weights in them::

    slice       0 0 0 1 1 1 2 2 2 | 2 2 2 1 1 1 0 0 0      forward | backward, three microbatches each
    loads       1     2           |       0
    gradients                     |       2     1     0
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from smpkit.errors import UsageError
from smpkit.torch.offload_model.engine import Engine, Modes, Slice
from smpkit.torch.offload_model.moment import Autocast, RandomState, random_state, repeating
from smpkit.torch.offload_model.parking import Parked
from smpkit.torch.offload_model.saved import discarding, without_weights
from smpkit.torch.offload_model.values import Joined, Structure, flatten, join, join_gradients, split

__all__ = ["Run"]

_ON_DEVICE: Final = 2  # microbatches whose border tensors may wait on the device for the next slice


@dataclass
class _Boundary:
    """What goes from one slice to the next, of one microbatch."""

    structure: Structure
    tensors: list[Parked]
    owned: list[Parked]
    """Those that no earlier slice's boundary has; what slices hand on unchanged is parked once."""


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

    def __init__(self, engine: Engine, structure: Structure, *, training: bool) -> None:
        self.outputs: Structure
        """Of what the model returns; known after `forward`."""
        self._engine = engine
        self._structure = structure
        self._training = training
        self._recompute = training and engine.checkpoint
        self._autocast = Autocast.now(engine.device)
        self._pieces: list[list[_Piece]] = []
        self._keeps_graph = training and not engine.checkpoint
        self._count = 1
        self._joined: list[Joined] = []
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
        boundaries = [self._arriving(part) for part in parts]
        for number, column in enumerate(zip(*[each.tensors for each in boundaries], strict=True)):
            for parked in [column] if self._rows[number][0] is None else zip(column, strict=True):
                engine.parking.take_over(parked)
        last = len(engine.slices) - 1
        engine.residence.begin_forward()
        for index in range(last + 1):
            with engine.on_device(index, fresh=True, then=index + 1 if index < last else None):
                boundaries = self._forward_slice(index, boundaries)
        if engine.sink is None:  # else what writes weights waits for the copies that read them
            engine.residence.complete()
        self.outputs = boundaries[0].structure
        joined = join(
            [[engine.parking.take(parked) for parked in each.tensors] for each in boundaries],
            [[parked.shared for parked in each.tensors] for each in boundaries],
            [max((rows for rows in part if rows is not None), default=1) for part in zip(*self._rows, strict=True)],
        )
        self._joined = [how for _, how in joined]
        return [tensor for tensor, _ in joined], [parked.requires_grad for parked in boundaries[0].tensors]

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
        flowing = [[_parked(column[part]) for column in columns] for part in range(self._count)]
        if engine.sink is None:  # the parameters keep all of them
            engine.gradients.reserve()
        engine.gradients.prepare()
        landings = []
        for index in reversed(range(len(engine.slices))):
            with engine.on_device(index, fresh=False, then=index - 1 if index else None) as stand_ins:
                engine.gradients.begin(index, stand_ins)
                flowing = self._backward_slice(index, flowing, keep=keep)
                landings.append(engine.gradients.send(index, stand_ins))
            if (sink := engine.sink) is not None:
                sink.receive(landings.pop())
        rows = zip(*[[self._take(parked) for parked in row] for row in flowing], strict=True)
        joined = [join_gradients(*each) for each in zip(inputs, rows, self._rows, strict=True)]
        if not keep:
            self._pieces.clear()
        if engine.sink is None:  # else it is the sink who changes weights, after their gradients
            engine.residence.complete()
        return joined, engine.gradients.landed(landings, parameters)

    def _arriving(self, part: Sequence[Tensor]) -> _Boundary:
        tensors = [
            Parked(
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
            for parked in boundaries[number].tensors:
                self._engine.parking.fetch(parked)

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
        tensors = [engine.parking.take(parked) for parked in boundary.tensors]
        if not self._training:
            if self._count > 1:  # what a slice changes in place, other microbatches must get unchanged
                alone = [parked.shared is None or parked.origin is None for parked in boundary.tensors]
                tensors = [each if own else each.clone() for each, own in zip(tensors, alone, strict=True)]
            versions = _versions(tensors)
            with self._autocast.again():
                value = engine.call(index, boundary.structure.fill(tensors))
            # What the slice has changed in place must not come from the host again, where it is unchanged.
            changed = versions is None or versions != _versions(tensors)
            return self._outgoing(index, boundary, tensors, value, changed=changed)
        for tensor, parked in zip(tensors, boundary.tensors, strict=True):
            tensor.requires_grad_(parked.requires_grad)
        if not self._recompute:
            with without_weights(engine.residence, index):
                entered, value, changed = self._call(index, boundary, tensors)
            piece.graph = (tensors, flatten(value)[0])
        else:
            piece.modes, piece.random = engine.slices[index].modes, random_state(engine.device)
            with discarding(), engine.slices[index].buffers.remembered(piece.buffers):
                entered, value, changed = self._call(index, boundary, tensors)
        return self._outgoing(index, boundary, entered, value, changed=changed)

    def _call(self, index: int, boundary: _Boundary, tensors: list[Tensor]) -> tuple[list[Tensor], Any, bool]:
        """Run a slice with a graph; return what went in, what came out, and whether what went in was changed."""
        piece = self._engine.slices[index]
        with torch.enable_grad(), self._autocast.again():
            modes = piece.modes
            expected = piece.overwrites_input.get(modes)
            entered = tensors if expected is False else [tensor.clone() for tensor in tensors]
            versions = [tensor._version for tensor in entered]
            value = self._engine.call(index, boundary.structure.fill(entered))
        overwritten = any(tensor._version != version for tensor, version in zip(entered, versions, strict=True))
        self._learn(index, piece, modes, overwritten=overwritten)
        return entered, value, overwritten

    def _learn(self, index: int, piece: Slice, modes: Modes, *, overwritten: bool) -> None:
        """Remember whether a slice changes its input in place, which backward needs unchanged."""
        if overwritten and piece.overwrites_input.get(modes) is False:
            raise UsageError(
                f"slice {index} changed its input in place, which it had not done before, so the input is lost",
                hint="let its first layer do so always or never (ReLU(inplace=True) in only one branch?)",
            )
        piece.overwrites_input[modes] = piece.overwrites_input.get(modes, False) or overwritten

    def _outgoing(
        self, index: int, inputs: _Boundary, entered: Sequence[Tensor], value: Any, *, changed: bool
    ) -> _Boundary:
        """Make the boundary behind a slice, and start its way to the host if it is to wait there."""
        engine = self._engine
        known = {id(tensor): parked for tensor, parked in zip(entered, inputs.tensors, strict=True)}
        outputs, structure = flatten(value)
        tensors, owned = [], []
        for output in outputs:
            same = known.get(id(output))
            if same is not None and not changed:
                parked = same
            else:  # an input that comes out changed is a new tensor to the slices behind
                # A weight that is itself an output would be overwritten by the next slice but one.
                kept = output.detach().clone() if engine.residence.holds(output) else output.detach()
                parked = Parked(kept, requires_grad=output.requires_grad, shared=same.shared if same else None)
                owned.append(parked)
            tensors.append(parked)
        if index + 1 < len(engine.slices):
            self._send(owned, always=self._recompute)
        return _Boundary(structure, tensors, owned)

    def _send(self, owned: Sequence[Parked], *, always: bool) -> None:
        """Send tensors to the host: those that backward needs always, others when they would wait for many others."""
        few = self._count <= _ON_DEVICE
        if always or (not few and not self._keeps_graph):
            for parked in owned:
                self._engine.parking.send(parked, keep=few)

    def _backward_slice(
        self, index: int, flowing: list[list[Parked | None]], *, keep: bool
    ) -> list[list[Parked | None]]:
        pieces, results = self._pieces[index], []
        for number, (piece, gradients) in enumerate(zip(pieces, flowing, strict=True)):
            for ahead in (number, number + 1):
                self._fetch([each.inputs for each in pieces], ahead)
            results.append(self._backward_piece(index, piece, gradients, keep=keep))
        return results

    def _backward_piece(
        self, index: int, piece: _Piece, gradients: Sequence[Parked | None], *, keep: bool
    ) -> list[Parked | None]:
        """Return the gradients of the slice's inputs; those of its weights are added to the stand-ins'."""
        engine = self._engine
        arrived = [self._take(parked) for parked in gradients]
        with self._as_before(index, piece) if self._recompute else contextlib.nullcontext():
            inputs, outputs = piece.graph or self._repeat(index, piece)
            roots = [
                (output, gradient)
                for output, gradient in zip(outputs, arrived, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if roots:
                ends, starts = zip(*roots, strict=True)
                torch.autograd.backward(ends, starts, retain_graph=keep and piece.graph is not None)
        found = [_parked(tensor.grad) for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None  # a kept graph may be gone through again
        if not keep:
            piece.graph = None
            for parked in piece.inputs.owned:
                engine.parking.release(parked)
        if index:
            self._send([parked for parked in found if parked is not None], always=False)
        return found

    @contextlib.contextmanager
    def _as_before(self, index: int, piece: _Piece) -> Iterator[None]:
        """Let a slice be as it was before its forward."""
        at_work = self._engine.slices[index]
        with at_work.in_modes(piece.modes), at_work.buffers.as_before(piece.buffers):
            yield

    def _repeat(self, index: int, piece: _Piece) -> tuple[list[Tensor], list[Tensor]]:
        """Run a slice again as the first time, with a graph; return the tensors that went in and came out."""
        engine, boundary = self._engine, piece.inputs
        assert piece.random is not None
        tensors = [engine.parking.take(parked) for parked in boundary.tensors]
        for tensor, parked in zip(tensors, boundary.tensors, strict=True):
            tensor.requires_grad_(parked.requires_grad)
        with torch.enable_grad(), self._autocast.again(), repeating(piece.random, engine.device):
            overwrites = engine.slices[index].overwrites_input.get(piece.modes, True)
            entered = [tensor.clone() for tensor in tensors] if overwrites else tensors
            value = engine.call(index, boundary.structure.fill(entered))
        return tensors, flatten(value)[0]

    def _take(self, parked: Parked | None) -> Tensor | None:
        if parked is None:
            return None
        tensor = self._engine.parking.take(parked)
        self._engine.parking.release(parked)
        return tensor


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return how often tensors have been changed in place; None where torch does not count."""
    return None if any(tensor.is_inference() for tensor in tensors) else [tensor._version for tensor in tensors]


def _parked(gradient: Tensor | None) -> Parked | None:
    return None if gradient is None else Parked(gradient, requires_grad=False)
