"""Give every rank of a pipeline the arguments of pp_rank 0, as SMP v1 did.

Scripts give the other ranks the same batch, a dummy of another shape, an empty tensor or None, so what those pass says
nothing about what they need. Containers, plain values (numbers, strings, None, numpy's arrays) and tensors are those of
pp_rank 0. Anything else, such as the model or an optimizer, belongs to one process, so each rank uses its own.

The arguments travel from rank to rank, since each needs them later than the one before: their description, then the
data of their tensors in one block. On all ranks, pp_rank 0 included, the tensors are dense and in the memory order of
those of pp_rank 0: results of calls depend on strides, and a rank that took `batch[:, :-1]` for another kind of
argument than the others would wait for them for ever.

The states of pp_rank 0's generators travel along, Python's, numpy's and torch's: a step may draw labels for the first
layer and for the loss, as a GAN with classes does, or shuffle patches and put them back, as a masked autoencoder does.
Those lie on different ranks, and scripts seed ranks differently, or not at all.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.announce import announce
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import (
    NON_TENSOR_TYPES,
    Structure,
    TensorSpec,
    as_bytes,
    flatten,
    map_tensors,
    spec_of,
    to_layout,
)
from smpkit.torch.core.tree import children, map_leaves, pickled, rebuild
from smpkit.torch.core.warn import warn_user
from smpkit.torch.pipeline.host_link import HostLink
from smpkit.torch.pipeline.messages import Tag, pack, packed_bytes, unpack

_COMPARED_CALLS: Final = 2
"""How many calls have their values compared: data that is sharded wrongly differs from the first on."""
_PLAIN_TYPES: Final = NON_TENSOR_TYPES | {slice}
_ABSENT: Final = object()
_WHAT: Final = "the inputs of the step"


@dataclass(frozen=True, slots=True)
class _OwnObject:
    """Stands for an object of which each rank has its own."""

    kind: str


class Inputs:
    """The inputs of a pipeline's steps on this rank."""

    def __init__(self, hosts: HostLink) -> None:
        self._hosts, self._rank, self._device = hosts, state.pp_rank, state.device
        own = [devices.default_generator(self._device)] if devices.is_asynchronous(self._device) else []
        self._generators = [torch.default_generator, *own]
        # One rank reports for the job: data that is sharded wrongly is wrong in every pipeline.
        reports = (self._rank, state.tp_rank, state.rdp_rank) == (1, 0, 0) and not state.is_v1_script
        self._comparisons_left = _COMPARED_CALLS if reports else 0

    def share(self, call: str, arguments: Any) -> Any:
        """Return the arguments of pp_rank 0; all ranks of the pipeline call this.

        Args:
            call: names the step and what else decides what runs, in words.
            arguments: what this rank has passed; pp_rank 0's tensors must be strided.
        """
        return self._send(call, arguments) if self._rank == 0 else self._receive(call, arguments)

    def _send(self, call: str, arguments: Any) -> Any:
        structure, tensors, specs = _flatten_inputs(arguments)
        dense = [
            to_layout(tensor.clone() if tensor.is_inference() else tensor.detach(), spec.order)
            for tensor, spec in zip(tensors, specs, strict=True)
        ]
        try:
            description = pickled((call, self._random_states(), specs, structure))
        except Exception as error:  # whatever a class of the user raises
            raise UsageError(
                f"pipeline rank 0 passed arguments to {call} that cannot be sent to other ranks: {error}",
                hint="define their classes at the top level of a module, or pass tuples, lists and dicts",
            ) from error
        data = pack(dense)
        if any(devices.is_asynchronous(tensor.device) for tensor in dense):
            devices.wait_for_event(devices.record_event(self._device))
        self._relay(description, data)
        moved = [devices.to_device(tensor, self._device) for tensor in dense]
        same = {id(tensor): other for tensor, other in zip(tensors, moved, strict=True)}
        return map_tensors(lambda tensor: same.get(id(tensor), tensor), arguments)

    def _receive(self, call: str, own: Any) -> Any:
        source = self._rank - 1
        description = self._hosts.receive_object(source, _WHAT, Tag.INPUTS)
        theirs, random_states, specs, structure = pickle.loads(description)  # noqa: S301 - our own job's rank
        data = self._hosts.receive_bytes(packed_bytes(specs), source, Tag.INPUT_DATA, _WHAT)
        self._relay(description, data)
        if theirs != call:
            raise UsageError(
                f"pipeline rank {self._rank} called {call}, and pipeline rank 0 {theirs}",
                hint="all ranks of a pipeline call the same steps in the same order and mode",
            )
        self._set_random_states(*random_states)
        parts = unpack(devices.to_device(data, self._device), specs)
        arrived = [to_layout(part, spec.order) for part, spec in zip(parts, specs, strict=True)]
        if self._comparisons_left:
            self._compare(call, own, specs, arrived)
        return self._with_own_objects(structure.fill(arrived), own, call, ())

    def _random_states(self) -> tuple[Any, Any, list[bytes]]:
        """Return the states of the generators that code between layers may draw from."""
        return (
            random.getstate(),
            np.random.get_state(),
            [generator.get_state().numpy().tobytes() for generator in self._generators],
        )

    def _set_random_states(self, python: Any, numpy: Any, generators: Sequence[bytes]) -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, data in zip(self._generators, generators, strict=True):
            generator.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _with_own_objects(self, theirs: Any, own: Any, call: str, path: tuple[Any, ...]) -> Any:
        """Return a part of the arguments of pp_rank 0 with the objects that this rank has itself.

        Args:
            own: what this rank has passed in this place.
            path: keys and indices that lead there from `(args, kwargs)`.
        """
        kind = type(theirs)
        if kind is _OwnObject:
            if _name(type(own)) != theirs.kind:
                raise UsageError(
                    f"pipeline rank 0 passed an object of type `{theirs.kind}` as {_argument(path)} of {call},"
                    f" and pipeline rank {self._rank} passed"
                    f" {'nothing' if own is _ABSENT else f'one of type `{_name(type(own))}`'}",
                    hint="tensors, containers and plain values come from pipeline rank 0; every rank passes its own"
                    " object of any other type",
                )
            return own
        parts = children(theirs)
        if parts is None:
            return theirs
        mine = (children(own) if type(own) is kind else None) or {}
        # This rank's own container where it has the same items: its other attributes may not travel well.
        like = own if mine and list(mine) == list(parts) else theirs
        filled = {
            key: self._with_own_objects(part, mine.get(key, _ABSENT), call, (*path, key)) for key, part in parts.items()
        }
        return rebuild(like, filled)

    def _relay(self, description: bytes, data: torch.Tensor) -> None:
        if self._rank < state.pp_size - 1:
            self._hosts.send_object(description, [self._rank + 1], Tag.INPUTS, _WHAT)
            self._hosts.send_bytes(data, self._rank + 1, Tag.INPUT_DATA, _WHAT)

    def _compare(self, call: str, own: Any, specs: Sequence[TensorSpec], arrived: Sequence[torch.Tensor]) -> None:
        """Say once if this rank has passed other inputs to its first steps than pp_rank 0, whose inputs count."""
        self._comparisons_left -= 1
        _, tensors, own_specs = _flatten_inputs(own)
        shapes, expected = _shapes(own_specs), _shapes(specs)
        if shapes != expected:
            self._comparisons_left = 0
            used = f"pipeline rank 0's batch, {expected}, is used instead"
            announce([f"pipeline rank {self._rank} passed {shapes} to {call}: {used}."])
        elif not all(map(_has_same_bytes, tensors, arrived)):
            self._comparisons_left = 0
            warn_user(
                f"pipeline rank {self._rank} passed other values to {call} than pipeline rank 0, whose values are used:"
                " shard data by smp.dp_rank() of smp.dp_size(), not by smp.rank(), or a part of it is never trained on",
                by_rank=state.rank,
            )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _flatten_inputs(arguments: Any) -> tuple[Structure, list[torch.Tensor], list[TensorSpec]]:
    """Return the structure of arguments, their tensors (each once), and the specs that these have on arrival."""
    tensors, structure = flatten(map_leaves(_without_own_object, arguments))
    return structure, tensors, [spec_of(tensor).without_gradient.as_sent for tensor in tensors]


def _without_own_object(leaf: Any) -> Any:
    is_sent = isinstance(leaf, torch.Tensor | np.ndarray | np.generic) and not isinstance(leaf, nn.Parameter)
    return leaf if is_sent or type(leaf) in _PLAIN_TYPES else _OwnObject(_name(type(leaf)))


def _argument(path: tuple[Any, ...]) -> str:
    """Name a value by its path in `(args, kwargs)`."""
    _, argument, *inside = path
    name = f"argument {argument}" if isinstance(argument, int) else f"argument `{argument}`"
    return "".join([name, *(f"[{key!r}]" for key in inside)])


def _has_same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    both = [as_bytes(value.detach().cpu().contiguous()) for value in (tensor, other)]
    return torch.equal(*both)


def _shapes(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "no tensors"
