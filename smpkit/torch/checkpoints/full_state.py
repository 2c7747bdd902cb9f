"""Write files that hold the whole model, though no rank does.

First one rank per file system, its leader, makes the file with room for every tensor. Then, tensor by tensor, each rank
writes the chunks that it holds, contiguous run by run, directly to their place; what no rank of a file system holds is
sent to its leader. So a rank needs memory for one tensor at a time.

A module that tensor parallelism has replaced is written under the names of the script's own model. Its registration has
a translation back, which makes one whole tensor after the other from the whole tensors of the replacement
(`TranslatedModule`). These are gathered from the ranks when the translation asks for them, one at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from smpkit.errors import CheckpointError
from smpkit.plan.mesh import Coordinates
from smpkit.torch.checkpoints.file_systems import FileSystems
from smpkit.torch.checkpoints.folder import as_checkpoint_error
from smpkit.torch.checkpoints.integrity import add_checksums
from smpkit.torch.checkpoints.save_load import read_file
from smpkit.torch.checkpoints.state_entries import (
    MODEL,
    Chunk,
    StateEntry,
    TensorFactory,
    TensorsOnAccess,
    all_or_raise,
    chunks_of,
    model_entries,
    runs_of,
    translated,
    view_of,
)
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import allgather, recv_from, send
from smpkit.torch.model import DistributedModel
from smpkit.torch.placement.dtensor import full_tensor_of
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.registry import Translation
from smpkit.torch.tensor_parallel.state_dict import join_state, replaced_modules

__all__ = [
    "FileSlot",
    "FullState",
    "SlotWriter",
    "TranslatedModule",
    "full_state_of",
    "reserve_file",
    "write_slots",
    "write_whole_file",
]


@dataclass(frozen=True)
class TranslatedModule:
    """A module that has replaced another one.

    Args:
        prefix: of the names of its state.
        source: the rank that writes the translated tensors.
        pp_sources: the pipeline rank that provides a tensor of its state, where that is not the source's.
    """

    prefix: str
    module: nn.Module
    translation: Translation
    source: int
    pp_sources: Mapping[str, int]

    @property
    def takes_part(self) -> bool:
        """Whether this rank holds a piece that the source needs."""
        mine, theirs = (state.mesh.coordinates(rank) for rank in (state.rank, self.source))
        # Parameters of sharded data parallelism are gathered over all replicas, so all of them take part.
        together = state.cfg.sharded_data_parallel_degree > 1
        return mine.pp in {theirs.pp, *self.pp_sources.values()} and (together or mine.rdp == theirs.rdp)

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the translated tensors, by name; computed without data."""
        made = {name: make() for name, make in self._translated(self._empty)}
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}

    @cached_property
    def _own(self) -> Mapping[str, torch.Tensor]:
        """The state of the module on this rank."""
        return self.module.state_dict(keep_vars=True)

    @cached_property
    def _empty(self) -> Mapping[str, torch.Tensor]:
        """The whole state of the module, as tensors without data."""
        return {
            name: torch.empty(global_shape(value), dtype=value.dtype, device="meta")
            for name, value in self._own.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the translated tensors, in the translation's order."""
        return tuple(self.tensors)

    def gathered(self) -> Iterator[tuple[str, TensorFactory]]:
        """Yield names with functions that make each tensor. Making one is collective over the ranks that take part.

        Only the source gets values; the others get tensors without data.
        """
        return self._translated(TensorsOnAccess(self._own, self._gather))

    def _translated(self, values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, TensorFactory]]:
        return translated(self.translation, values, self.module, self.prefix)

    def _gather(self, name: str) -> torch.Tensor:
        """Gather a tensor on its pipeline rank, and send it to the source's if that is another one."""
        source = state.mesh.coordinates(self.source).pp
        pp_source = self.pp_sources.get(name, source)
        value = self._full_tensor(name) if state.pp_rank == pp_source else self._empty[name]
        if pp_source == source or state.tp_rank > 0:
            return value
        if state.pp_rank == pp_source:
            send(value, state.mesh.rank(Coordinates(source, 0, state.rdp_rank)))
            return self._empty[name]
        if state.pp_rank == source:
            whole: torch.Tensor = recv_from(state.mesh.rank(Coordinates(pp_source, 0, state.rdp_rank)))
            return whole
        return value

    def _full_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the first tensor-parallel rank, one without data on the others; collective."""
        value = full_tensor_of(self._own[name])
        shard = shard_of(self._own[name])
        if shard is not None and shard.is_distributed:
            value = join_state(self.module, {name: value.detach()}, on_first=True).get(name)
        return value.detach() if state.tp_rank == 0 else self._empty[name]


@dataclass(frozen=True)
class FullState:
    """The tensors of the whole model's state dict.

    Args:
        tensors: shape and dtype by name.
        modules: whose translations make some of them.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    modules: tuple[TranslatedModule, ...] = field(default=())

    @cached_property
    def translated(self) -> frozenset[str]:
        """The names of all translated tensors."""
        return frozenset(name for module in self.modules for name in module.names)


def full_state_of(model: DistributedModel, *, translate: bool) -> FullState:
    """Return the tensors of the whole model's state dict, the same on all ranks.

    Args:
        translate: whether to use the names of the script's own model, where a translation is known.
    """
    modules = tuple(_translated_modules(model)) if translate else ()
    inside = tuple(module.prefix for module in modules)
    tensors = {
        name: (tuple(global_shape(value)), value.dtype)
        for name, value in model.module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor) and not (inside and name.startswith(inside))
    }
    for module in modules:
        tensors |= module.tensors
    return FullState(tensors, modules)


def _translated_modules(model: DistributedModel) -> Iterator[TranslatedModule]:
    for name, module, entry in replaced_modules(model.module):
        if entry.from_distributed is not None:
            source, pp_sources = _pp_sources_of(model, module)
            rank = state.mesh.rank(Coordinates(pp=source, tp=0, rdp=0))
            yield TranslatedModule(f"{name}." if name else "", module, entry.from_distributed, rank, pp_sources)


def _pp_sources_of(model: DistributedModel, module: nn.Module) -> tuple[int, Mapping[str, int]]:
    """Return the pipeline rank that gathers a module, and by name the rank of each tensor that it does not hold."""
    named = module.named_parameters(remove_duplicate=False)
    places = {name: model.placement.of(each) for name, each in named}
    # The lowest rank that holds the whole module, if there is one.
    common = frozenset(range(state.pp_size)).intersection(*(each.pp_ranks for each in places.values()))
    source = min(common) if common else min(each.first_pp_rank for each in places.values())
    return source, {name: each.first_pp_rank for name, each in places.items() if source not in each.pp_ranks}


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileSlot:
    """The room for a whole tensor in a file.

    Args:
        offset: of its first byte.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_whole_file(
    path: Path, model: DistributedModel, file_systems: FileSystems, failure: str, *, translate: bool
) -> None:
    """Write a model's whole state dict as `torch.save` would, to one file on each file system; all ranks call this.

    Args:
        translate: whether to use the names that modules had before tensor parallelism replaced them.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    full_state = all_or_raise(failure, lambda: full_state_of(model, translate=translate))
    entries = all_or_raise(failure, lambda: model_entries(model))
    own = {entry.name.removeprefix(MODEL): entry.value for entry in entries if entry.shape is None}
    others = {name: value for part in allgather(own) for name, value in part.items()}  # not tensors, of all ranks
    made = all_or_raise(failure, lambda: _make_file(path, model, full_state, others) if file_systems.is_leader else {})
    slots = allgather(made)[file_systems.leaders[state.rank]]
    write_slots(slots, full_state, entries, file_systems, failure)
    all_or_raise(failure, lambda: _add_checksums(path) if file_systems.is_leader else None)


def _add_checksums(path: Path) -> None:
    with as_checkpoint_error(f"{path.name} cannot be written"):
        add_checksums(path)


def _make_file(
    path: Path, model: DistributedModel, full_state: FullState, others: Mapping[str, Any]
) -> dict[str, FileSlot]:
    """Make the file with room for all tensors; return the slot of each."""
    with FakeTensorMode():
        content = {**_fake_tensors(model, full_state), **others}
    return {name: slot for name, slot in reserve_file(path, content).items() if isinstance(slot, FileSlot)}


def reserve_file(path: Path, content: Any) -> Any:
    """Write a file with room for fake tensors, as `torch.save` would; return its content with slots in their place."""
    # `torch.save` writes all of the file's structure, and skips the data: no rank has memory for it.
    reserve = torch.serialization.skip_data(materialize_fake_tensors=True)
    with as_checkpoint_error(f"{path.name} cannot be written"), reserve:
        torch.save(content, path)
    # Reading on fake tensors tells where in the file torch has left room for each.
    with FakeTensorMode():
        found = read_file(path)

    def slot(value: torch.Tensor) -> FileSlot:
        offset = value.untyped_storage()._checkpoint_offset  # private in torch, seen in 2.13
        assert offset is not None
        return FileSlot(path, offset, tuple(value.shape), value.dtype)

    return tree_map_only(torch.Tensor, slot, found)


def _fake_tensors(model: DistributedModel, full_state: FullState) -> dict[str, torch.Tensor]:
    """Return whole tensors without memory; all names of a tied weight share one, as `torch.save` expects."""
    own = model.module.state_dict(keep_vars=True)
    known: dict[object, torch.Tensor] = {}
    result = {}
    for name, (shape, dtype) in full_state.tensors.items():
        key = id(own[name]) if name in own and name not in full_state.translated else name
        if key not in known:
            known[key] = torch.empty(shape, dtype=dtype, device="cpu")
        result[name] = known[key]
    return result


def write_slots(
    slots: Mapping[str, FileSlot],
    full_state: FullState,
    entries: Iterable[StateEntry],
    file_systems: FileSystems,
    failure: str,
) -> None:
    """Fill the slots with this rank's part, and with what no rank of its file system holds; all ranks call this.

    Args:
        slots: by the name of the whole tensor.
        entries: what this rank holds of the model.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    named = {entry.name.removeprefix(MODEL): entry for entry in entries if entry.shape is not None}
    wanted = {name: entry for name, entry in named.items() if name in slots and name not in full_state.translated}
    with contextlib.closing(SlotWriter()) as writer:
        all_or_raise(failure, lambda: _write_own(slots, wanted, file_systems, writer))
        if len(set(file_systems.leaders)) > 1:
            own: list[tuple[str, tuple[Chunk, ...], frozenset[int]]] = []
            for name, entry in wanted.items():
                if min(entry.holders) == state.rank:
                    own.append((name, entry.chunks, entry.holders))
            held = [(source, *item) for source, found in enumerate(allgather(own)) for item in found]
            all_or_raise(failure, lambda: _send_missing(slots, wanted, held, file_systems, writer))
        for translated in full_state.modules:
            all_or_raise(failure, lambda each=translated: _write_translated(slots, each, file_systems, writer))  # type: ignore[misc]
        all_or_raise(failure, writer.finish)


class SlotWriter:
    """Writes chunks into slots."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def write(self, slot: FileSlot, chunks: Iterable[Chunk], value: torch.Tensor) -> None:
        """Write the chunks of a whole tensor that `value` holds."""
        with as_checkpoint_error(f"{slot.path.name} cannot be written"):
            if slot.path not in self._files:
                self._files[slot.path] = os.open(slot.path, os.O_WRONLY)
            _write_chunks(self._files[slot.path], slot, chunks, value)

    def finish(self) -> None:
        """Flush everything to the disk."""
        for path, file in self._files.items():
            with as_checkpoint_error(f"{path.name} cannot be written"):
                os.fsync(file)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)


def _write_own(
    slots: Mapping[str, FileSlot], wanted: Mapping[str, StateEntry], file_systems: FileSystems, writer: SlotWriter
) -> None:
    for name, entry in wanted.items():
        if file_systems.writer(entry.holders) == state.rank:
            writer.write(slots[name], entry.chunks, entry.value)


def _write_chunks(file: int, slot: FileSlot, chunks: Iterable[Chunk], value: torch.Tensor) -> None:
    size = slot.dtype.itemsize
    for chunk in chunks:
        part = view_of(value.detach(), chunk.local_start, chunk.sizes)
        plain = part.to("cpu", slot.dtype).contiguous().reshape(-1).view(torch.uint8)
        data, done = plain.numpy().data, 0
        for first, length in runs_of(slot.shape, chunk):
            _write_all(file, data[done : done + length * size], slot.offset + first * size)
            done += length * size


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


_HeldTensor = tuple[int, str, tuple[Chunk, ...], frozenset[int]]
"""Rank that sends, name, chunks, and all ranks that hold the same."""


def _send_missing(
    slots: Mapping[str, FileSlot],
    wanted: Mapping[str, StateEntry],
    held: Iterable[_HeldTensor],
    file_systems: FileSystems,
    writer: SlotWriter,
) -> None:
    """Send to each file system's leader what none of its ranks holds, from the lowest rank that does."""
    leaders = sorted(set(file_systems.leaders))
    failed: CheckpointError | None = None
    # All ranks go through the same list in the same order, and go on after a failure: each send must meet its receive.
    for source, name, chunks, holders in held:
        for leader in leaders:
            if holders & file_systems.ranks_led_by(leader):
                continue
            if source == state.rank:
                send(wanted[name].value.detach(), leader)
            elif leader == state.rank:
                value = recv_from(source)
                try:
                    writer.write(slots[name], chunks, value)
                except CheckpointError as error:
                    failed = failed or error
    if failed is not None:
        raise failed


def _write_translated(
    slots: Mapping[str, FileSlot], translated: TranslatedModule, file_systems: FileSystems, writer: SlotWriter
) -> None:
    """Write the translated tensors of a module, one at a time, on every file system.

    The ranks that take part make each tensor together; the source has it, and sends it to the other leaders.
    """
    source = translated.source
    failed: CheckpointError | None = None
    others = sorted(set(file_systems.leaders) - {file_systems.leaders[source]})
    made = translated.gathered() if translated.takes_part else dict.fromkeys(translated.names, None).items()
    for name, make in made:
        value = None if make is None else make()
        if name not in slots:
            continue
        try:
            if state.rank == source:
                assert value is not None
                for leader in others:
                    send(value, leader)
            elif state.rank in others:
                value = recv_from(source)
            if state.rank == source or state.rank in others:
                assert value is not None
                writer.write(slots[name], chunks_of(value.shape), value)
        except CheckpointError as error:  # go on: the other ranks wait for this one in the next tensor
            failed = failed or error
    if failed is not None:
        raise failed
