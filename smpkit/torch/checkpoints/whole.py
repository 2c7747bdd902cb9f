"""Write files that hold the whole model, though no rank does: each writes its chunks where they belong.

First somebody makes the file with the space for every tensor. Then, tensor by tensor, each rank writes the chunks that
it holds, contiguous run by run, straight to their place; what no rank on a file system holds is sent to its leader. So
a rank needs memory for one tensor at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoint_files import as_checkpoint_error
from smpkit.torch.checkpoints.contents import MODEL, StateEntry, model_entries
from smpkit.torch.checkpoints.originals import FullState, TranslatedModule, full_state_of
from smpkit.torch.checkpoints.places import Chunk, runs_of, view_of
from smpkit.torch.checkpoints.sharing import FileSystems
from smpkit.torch.checkpoints.together import Model, all_or_raise
from smpkit.torch.comm import allgather, recv_from, send
from smpkit.torch.saving import read_file
from smpkit.torch.state import state

__all__ = ["FileSlot", "write_slots", "write_whole_file"]


@dataclass(frozen=True)
class FileSlot:
    """The space for a whole tensor in a file.

    Args:
        offset: of its first byte.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_whole_file(path: Path, model: Model, file_systems: FileSystems, failure: str, *, translate: bool) -> None:
    """Write a model's whole state dict as `torch.save` would, to one file on each file system; all ranks call this.

    Args:
        translate: under the names that parts had before tensor parallelism replaced them, where that is known.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    full_state = all_or_raise(failure, lambda: full_state_of(model, translate=translate))
    entries = all_or_raise(failure, lambda: model_entries(model))
    others = _non_tensors(entries)
    made = all_or_raise(failure, lambda: _make_file(path, model, full_state, others) if file_systems.is_leader else {})
    slots = allgather(made)[file_systems.leaders[state.rank]]
    write_slots(slots, full_state, entries, file_systems, failure)


def _non_tensors(entries: Iterable[StateEntry]) -> dict[str, Any]:
    """Return what is no tensor in the state dicts of all ranks together."""
    own = {entry.name.removeprefix(MODEL): entry.value for entry in entries if entry.shape is None}
    return {name: value for part in allgather(own) for name, value in part.items()}


def _make_file(path: Path, model: Model, full_state: FullState, others: Mapping[str, Any]) -> dict[str, FileSlot]:
    """Make the file with room for all tensors; return where each is."""
    with FakeTensorMode():
        content = {**_fake_tensors(model, full_state), **others}
    reserve = torch.serialization.skip_data(materialize_fake_tensors=True)
    with as_checkpoint_error(f"{path.name} cannot be written"), reserve:
        torch.save(content, path)
    with FakeTensorMode():
        found = read_file(path)
    slots = {}
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            offset = value.untyped_storage()._checkpoint_offset  # where torch says it has left room
            assert offset is not None
            slots[name] = FileSlot(path, offset, tuple(value.shape), value.dtype)
    return slots


def _fake_tensors(model: Model, full_state: FullState) -> dict[str, torch.Tensor]:
    """Return whole tensors without memory; the names of one parameter share one."""
    own = model.module.state_dict(keep_vars=True)
    known: dict[object, torch.Tensor] = {}
    result = {}
    for name, (shape, dtype) in full_state.tensors.items():
        key = id(own[name]) if name in own and name not in full_state.translated else name
        if key not in known:
            known[key] = torch.empty(shape, dtype=dtype, device="cpu")
        result[name] = known[key]
    return result


# --- writing into the space -------------------------------------------------------------------------------------------


def write_slots(
    slots: Mapping[str, FileSlot],
    full_state: FullState,
    entries: Iterable[StateEntry],
    file_systems: FileSystems,
    failure: str,
) -> None:
    """Write this rank's part of what there are slots for, and what its file system lacks; all ranks call this.

    Args:
        slots: by the name of the whole tensor.
        entries: what this rank holds of the model.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    named = {entry.name.removeprefix(MODEL): entry for entry in entries if entry.shape is not None}
    wanted = {name: entry for name, entry in named.items() if name in slots and name not in full_state.translated}
    with contextlib.closing(_Writer()) as writer:
        all_or_raise(failure, lambda: _write_own(slots, wanted, file_systems, writer))
        if len(set(file_systems.leaders)) > 1:
            held = [
                (name, entry.chunks, entry.holders)
                for name, entry in wanted.items()
                if min(entry.holders) == state.rank
            ]
            listed = [(source, *item) for source, found in enumerate(allgather(held)) for item in found]
            all_or_raise(failure, lambda: _send_missing(slots, wanted, listed, file_systems, writer))
        for translated in full_state.modules:
            all_or_raise(failure, lambda each=translated: _write_translated(slots, each, file_systems, writer))  # type: ignore[misc]
        all_or_raise(failure, writer.finish)


class _Writer:
    """Writes chunks into slots."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def write(self, slot: FileSlot, chunks: Iterable[Chunk], value: torch.Tensor) -> None:
        """Write what of a whole tensor `value` holds."""
        with as_checkpoint_error(f"{slot.path.name} cannot be written"):
            if slot.path not in self._files:
                self._files[slot.path] = os.open(slot.path, os.O_WRONLY)
            _write_chunks(self._files[slot.path], slot, chunks, value)

    def finish(self) -> None:
        """Push everything to the disk."""
        for path, file in self._files.items():
            with as_checkpoint_error(f"{path.name} cannot be written"):
                os.fsync(file)

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            os.close(file)


def _write_own(
    slots: Mapping[str, FileSlot], wanted: Mapping[str, StateEntry], file_systems: FileSystems, writer: _Writer
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
"""Which rank has what, which ranks hold the same."""


def _send_missing(
    slots: Mapping[str, FileSlot],
    wanted: Mapping[str, StateEntry],
    held: Iterable[_HeldTensor],
    file_systems: FileSystems,
    writer: _Writer,
) -> None:
    """Bring to each file system what none of its own ranks holds: from the lowest that does to its leader."""
    leaders = sorted(set(file_systems.leaders))
    failed: CheckpointError | None = None
    # Every rank goes through the same list in the same order, so each send meets its receive, even after a failure.
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
    slots: Mapping[str, FileSlot], translated: TranslatedModule, file_systems: FileSystems, writer: _Writer
) -> None:
    """Write what a translation makes of a module, one tensor at a time, on every file system.

    The tensor-parallel ranks that hold the module make each tensor together; the first of them has it.
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
                zeros = (0,) * value.dim()
                writer.write(slots[name], [Chunk(zeros, tuple(value.shape), zeros)], value)
        except CheckpointError as error:  # the others go on, and so must this one
            failed = failed or error
    if failed is not None:
        raise failed
