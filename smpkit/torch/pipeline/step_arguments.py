"""The arguments of a step without the data of their tensors: what pp_rank 0 tells the other ranks once.

Every rank of a pipeline runs a step with the arguments of pp_rank 0. Scripts give the other ranks the same batch, a
dummy of another shape, an empty tensor or None, so what those pass says nothing about what they need. Containers, plain
values (numbers, strings, None) and tensors are those of pp_rank 0. Anything else, such as the model or an optimizer,
belongs to one process, so each rank uses its own.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.core.tensor_spec import NON_TENSOR_TYPES, TensorSpec, describe, spec_of
from smpkit.torch.core.tree import children, pickled, rebuild

__all__ = ["ArgumentsKey", "StepArguments", "key_of"]

ArgumentsKey = tuple[Any, ...]
"""Equal for calls of one step whose arguments are equal but for the data of their tensors."""

_PLAIN_TYPES: Final = NON_TENSOR_TYPES | {slice}
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class _TensorAt:
    """Stands for a tensor."""

    index: int


@dataclass(frozen=True, slots=True)
class _OwnObject:
    """Stands for an object of which each rank has its own."""

    kind: str


@dataclass(frozen=True, slots=True)
class _Unsendable:
    """Stands for arguments that cannot be pickled."""

    why: str


def key_of(call: str, arguments: Any) -> tuple[ArgumentsKey, list[torch.Tensor]]:
    """Return the key of a call, and the tensors among its arguments, each once; parameters do not count.

    Args:
        call: names the step and what else decides what runs: "`train_step` (training, with gradients)".
        arguments: a nested container.
    """
    key: list[Any] = [call]
    tensors: list[torch.Tensor] = []
    indices: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            key.append(nn.Parameter)
            return tensor
        index = indices.setdefault(id(tensor), len(tensors))
        if index == len(tensors):
            tensors.append(tensor)
        key.extend((index, _sent_spec(tensor)))
        return tensor

    describe(arguments, key, note)
    return tuple(key), tensors


@dataclass(frozen=True)
class StepArguments:
    """The arguments that pp_rank 0 has passed to a step, without the data of their tensors."""

    call: str
    digest: int
    """Of the key; the same in every process."""
    specs: tuple[TensorSpec, ...]
    """Of the tensors, which travel dense."""
    template: Any
    """The arguments with placeholders for tensors and for objects that each rank has of its own."""

    @staticmethod
    def of(key: ArgumentsKey, arguments: Any, tensors: Sequence[torch.Tensor]) -> StepArguments:
        """Describe the arguments for which `key_of` has returned this key and these tensors."""
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        specs = tuple([_sent_spec(tensor) for tensor in tensors])
        return StepArguments(key[0], _digest(key), specs, _template(arguments, indices))

    def to_bytes(self) -> bytes:
        """Return these for another rank of this job."""
        try:
            return pickled(self)
        except Exception as error:  # whatever a class of the user raises
            return pickled(StepArguments(self.call, self.digest, self.specs, _Unsendable(str(error))))

    @staticmethod
    def from_bytes(data: bytes) -> StepArguments:
        """Return what another rank of this job has described."""
        arguments: StepArguments = pickle.loads(data)  # noqa: S301 - our own job's rank
        return arguments

    def filled(self, tensors: Sequence[torch.Tensor], own: Any, rank: int) -> Any:
        """Return the arguments with these tensors.

        Args:
            tensors: one for each of `specs`.
            own: what this rank has passed itself.
            rank: this pp_rank, for errors.

        Raises:
            UsageError: pp_rank 0 has passed an object of which this rank has none.
        """
        template = self.template
        if isinstance(template, _Unsendable):
            key, mine = key_of(self.call, own)
            if _digest(key) != self.digest:
                raise UsageError(
                    f"pipeline rank 0 passed arguments to {self.call} that cannot be sent to other ranks:"
                    f" {template.why}",
                    hint="define their classes at the top level of a module, or pass arguments of the same structure"
                    " on all ranks",
                )
            template = _template(own, {id(tensor): index for index, tensor in enumerate(mine)})
        return _Filling(tensors, self.call, rank).filled(template, own, ())


def _sent_spec(tensor: torch.Tensor) -> TensorSpec:
    return spec_of(tensor).without_gradient.as_sent


def _digest(key: ArgumentsKey) -> int:
    text = "\n".join([_text(part) for part in key])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _text(part: Any) -> str:
    if isinstance(part, type):
        return _name(part)
    return f"{part}{part.order}" if isinstance(part, TensorSpec) else repr(part)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _template(value: Any, indices: dict[int, int]) -> Any:
    if isinstance(value, torch.Tensor) and id(value) in indices:
        return _TensorAt(indices[id(value)])
    parts = children(value)
    if parts is not None:
        return rebuild(value, {key: _template(part, indices) for key, part in parts.items()})
    return value if type(value) in _PLAIN_TYPES else _OwnObject(_name(type(value)))


@dataclass(frozen=True)
class _Filling:
    """Puts tensors, and the objects of a rank, into the arguments of pp_rank 0."""

    tensors: Sequence[torch.Tensor]
    call: str
    rank: int

    def filled(self, template: Any, own: Any, path: tuple[Any, ...]) -> Any:
        """Return a part of the arguments.

        Args:
            own: what this rank has passed in this place.
            path: keys and indices that lead there from `(args, kwargs)`.
        """
        kind = type(template)
        if kind is _TensorAt:
            return self.tensors[template.index]
        if kind is _OwnObject:
            if _name(type(own)) != template.kind:
                raise UsageError(
                    f"pipeline rank 0 passed an object of type `{template.kind}` as {_argument(path)} of {self.call},"
                    f" and pipeline rank {self.rank} passed"
                    f" {'nothing' if own is _ABSENT else f'one of type `{_name(type(own))}`'}",
                    hint="tensors, containers and plain values come from pipeline rank 0; every rank passes its own"
                    " object of any other type",
                )
            return own
        parts = children(template)
        if parts is None:
            return template
        mine = (children(own) if type(own) is kind else None) or {}
        # This rank's own container where it has the same items: its other attributes may not travel well.
        like = own if mine and list(mine) == list(parts) else template
        return rebuild(
            like, {key: self.filled(part, mine.get(key, _ABSENT), (*path, key)) for key, part in parts.items()}
        )


def _argument(path: tuple[Any, ...]) -> str:
    """Name a value by its path in `(args, kwargs)`."""
    _, argument, *inside = path
    name = f"argument {argument}" if isinstance(argument, int) else f"argument `{argument}`"
    return "".join([name, *(f"[{key!r}]" for key in inside)])
