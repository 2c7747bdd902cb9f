"""Modules under other names in a checkpoint than in the model, because tensor parallelism has replaced them in one.

A replaced module's registration has translations of whole state dicts, both ways. They are given tensors that are read
when they are asked for, so there is one whole tensor at a time; optimizer states translate as their parameters do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smpkit.torch.checkpoints.places import Chunk
from smpkit.torch.checkpoints.planner import Target, read_into
from smpkit.torch.checkpoints.reader import PieceReader
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.registry import Translation
from smpkit.torch.tensor_parallel.replace import replacement_stubs
from smpkit.torch.tensor_parallel.whole_state import replaced_modules

__all__ = ["KeyMapping", "TensorFactory", "key_mappings", "read_whole"]

TensorFactory = Callable[[], torch.Tensor]
"""Makes a whole tensor when it is wanted."""


@dataclass(frozen=True)
class KeyMapping:
    """One such module.

    Args:
        prefix: what its names begin with, here and there.
        in_checkpoint: its names in the checkpoint, without the prefix.
        module: the distributed module, which the translation asks for its sizes.
    """

    prefix: str
    in_checkpoint: tuple[str, ...]
    module: nn.Module
    translation: Translation

    def factories(self, reader: PieceReader, full: Callable[[str], str]) -> dict[str, TensorFactory]:
        """Return what makes each whole tensor of the model's own state, by name.

        Args:
            full: the name in the checkpoint of what belongs to one of its names there. What is missing is left out.
        """
        items = reader.metadata.state_dict_metadata
        names = {name: full(self.prefix + name) for name in self.in_checkpoint}
        there = {name: each for name, each in names.items() if isinstance(items.get(each), TensorStorageMetadata)}
        factories = self.translation(_LazyTensors(reader, there), self.module)
        return {self.prefix + name: each if callable(each) else _constant(each) for name, each in factories}


def key_mappings(root: nn.Module, names: Collection[str]) -> list[KeyMapping]:
    """Return the modules of a model that a checkpoint with these names has under others."""
    found = []
    for prefix, module, ours, in_checkpoint, translation in _candidates(root):
        inside = tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        known = in_checkpoint is None or set(inside) <= in_checkpoint
        if translation is not None and inside and known and not set(inside) <= ours:
            found.append(KeyMapping(prefix, inside, module, translation))
    return found


_Candidate = tuple[str, nn.Module, AbstractSet[str], AbstractSet[str] | None, Translation | None]
"""Prefix, distributed module, names here, possible names there (None: any), translation from there to here."""


def _candidates(root: nn.Module) -> Iterator[_Candidate]:
    for name, module, entry in replaced_modules(root):
        # What the original's names were, only the translation knows.
        yield _prefix(name), module, set(module.state_dict()), None, entry.to_distributed
    if state.tp_size == 1:
        for name, module, twin, entry in replacement_stubs(root):
            yield _prefix(name), twin, set(module.state_dict()), set(twin.state_dict()), entry.from_distributed


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def read_whole(reader: PieceReader, name: str) -> torch.Tensor:
    """Read one whole tensor of a checkpoint."""
    item = reader.metadata.state_dict_metadata[name]
    assert isinstance(item, TensorStorageMetadata)
    tensor = torch.empty(item.size, dtype=item.properties.dtype, device="cpu")
    zeros = (0,) * tensor.dim()
    read_into(reader, {name: Target(tensor, [Chunk(zeros, tuple(item.size), zeros)])})
    return tensor


def _constant(tensor: torch.Tensor) -> TensorFactory:
    return lambda: tensor


class _LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors that are read when they are asked for; the last is kept, because parts of it may be wanted in turn."""

    def __init__(self, reader: PieceReader, names: Mapping[str, str]) -> None:
        self._reader = reader
        self._names = names
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        full = self._names[name]
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, read_whole(self._reader, full)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
