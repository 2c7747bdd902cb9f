"""Write files that hold the whole model, though no rank does: each writes its boxes where they belong.

First somebody makes the file with the space for every tensor. Then, tensor by tensor, each rank writes the boxes that
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
from smpkit.torch.checkpoints.contents import MODEL, Entry, model_entries
from smpkit.torch.checkpoints.originals import Translated, Whole, whole_of
from smpkit.torch.checkpoints.places import Box, runs_of, view_of
from smpkit.torch.checkpoints.sharing import Sharing
from smpkit.torch.checkpoints.together import Model, all_succeed
from smpkit.torch.comm import allgather, recv_from, send
from smpkit.torch.saving import read_file
from smpkit.torch.state import state

__all__ = ["Slot", "write_slots", "write_whole_file"]


@dataclass(frozen=True)
class Slot:
    """The space for a whole tensor in a file.

    Args:
        offset: of its first byte.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_whole_file(path: Path, model: Model, sharing: Sharing, failure: str, *, translate: bool) -> None:
    """Write a model's whole state dict as `torch.save` would, to one file on each file system; all ranks call this.

    Args:
        translate: under the names that parts had before tensor parallelism replaced them, where that is known.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    whole = all_succeed(failure, lambda: whole_of(model, translate=translate))
    entries = all_succeed(failure, lambda: model_entries(model))
    others = _other_things(entries)
    made = all_succeed(failure, lambda: _make_file(path, model, whole, others) if sharing.leads else {})
    slots = allgather(made)[sharing.leaders[state.rank]]
    write_slots(slots, whole, entries, sharing, failure)


def _other_things(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return what is no tensor in the state dicts of all ranks together."""
    own = {entry.name.removeprefix(MODEL): entry.value for entry in entries if entry.shape is None}
    return {name: value for part in allgather(own) for name, value in part.items()}


def _make_file(path: Path, model: Model, whole: Whole, others: Mapping[str, Any]) -> dict[str, Slot]:
    """Make the file with room for all tensors; return where each is."""
    with FakeTensorMode():
        content = {**_imagined(model, whole), **others}
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
            slots[name] = Slot(path, offset, tuple(value.shape), value.dtype)
    return slots


def _imagined(model: Model, whole: Whole) -> dict[str, torch.Tensor]:
    """Return whole tensors without memory; the names of one parameter share one."""
    own = model.module.state_dict(keep_vars=True)
    known: dict[object, torch.Tensor] = {}
    result = {}
    for name, (shape, dtype) in whole.tensors.items():
        key = id(own[name]) if name in own and name not in whole.translated else name
        if key not in known:
            known[key] = torch.empty(shape, dtype=dtype, device="cpu")
        result[name] = known[key]
    return result


# --- writing into the space -------------------------------------------------------------------------------------------


def write_slots(
    slots: Mapping[str, Slot], whole: Whole, entries: Iterable[Entry], sharing: Sharing, failure: str
) -> None:
    """Write this rank's part of what there are slots for, and what its file system lacks; all ranks call this.

    Args:
        slots: by the name of the whole tensor.
        entries: what this rank holds of the model.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    named = {entry.name.removeprefix(MODEL): entry for entry in entries if entry.shape is not None}
    wanted = {name: entry for name, entry in named.items() if name in slots and name not in whole.translated}
    with contextlib.closing(_Writer()) as writer:
        all_succeed(failure, lambda: _write_own(slots, wanted, sharing, writer))
        if len(set(sharing.leaders)) > 1:
            things = [
                (name, entry.boxes, entry.holders) for name, entry in wanted.items() if min(entry.holders) == state.rank
            ]
            listed = [(source, *thing) for source, found in enumerate(allgather(things)) for thing in found]
            all_succeed(failure, lambda: _send_what_lacks(slots, wanted, listed, sharing, writer))
        for translated in whole.modules:
            all_succeed(failure, lambda each=translated: _write_translated(slots, each, sharing, writer))  # type: ignore[misc]
        all_succeed(failure, writer.finish)


class _Writer:
    """Writes boxes into slots."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def write(self, slot: Slot, boxes: Iterable[Box], value: torch.Tensor) -> None:
        """Write what of a whole tensor `value` holds."""
        with as_checkpoint_error(f"{slot.path.name} cannot be written"):
            if slot.path not in self._files:
                self._files[slot.path] = os.open(slot.path, os.O_WRONLY)
            _write_boxes(self._files[slot.path], slot, boxes, value)

    def finish(self) -> None:
        """Push everything to the disk."""
        for path, file in self._files.items():
            with as_checkpoint_error(f"{path.name} cannot be written"):
                os.fsync(file)

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            os.close(file)


def _write_own(slots: Mapping[str, Slot], wanted: Mapping[str, Entry], sharing: Sharing, writer: _Writer) -> None:
    for name, entry in wanted.items():
        if sharing.writer(entry.holders) == state.rank:
            writer.write(slots[name], entry.boxes, entry.value)


def _write_boxes(file: int, slot: Slot, boxes: Iterable[Box], value: torch.Tensor) -> None:
    size = slot.dtype.itemsize
    for box in boxes:
        part = view_of(value.detach(), box.at, box.sizes)
        plain = part.to("cpu", slot.dtype).contiguous().reshape(-1).view(torch.uint8)
        data, done = plain.numpy().data, 0
        for first, length in runs_of(slot.shape, box):
            _write_all(file, data[done : done + length * size], slot.offset + first * size)
            done += length * size


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


_Thing = tuple[int, str, tuple[Box, ...], frozenset[int]]
"""Which rank has what, which ranks hold the same."""


def _send_what_lacks(
    slots: Mapping[str, Slot],
    wanted: Mapping[str, Entry],
    things: Iterable[_Thing],
    sharing: Sharing,
    writer: _Writer,
) -> None:
    """Bring to each file system what none of its own ranks holds: from the lowest that does to its leader."""
    leaders = sorted(set(sharing.leaders))
    failed: CheckpointError | None = None
    # Every rank goes through the same list in the same order, so each send meets its receive, even after a failure.
    for source, name, boxes, holders in things:
        for leader in leaders:
            if holders & sharing.on(leader):
                continue
            if source == state.rank:
                send(wanted[name].value.detach(), leader)
            elif leader == state.rank:
                value = recv_from(source)
                try:
                    writer.write(slots[name], boxes, value)
                except CheckpointError as error:
                    failed = failed or error
    if failed is not None:
        raise failed


def _write_translated(slots: Mapping[str, Slot], translated: Translated, sharing: Sharing, writer: _Writer) -> None:
    """Write what a translation makes of a module, one tensor at a time, on every file system.

    The tensor-parallel ranks that hold the module make each tensor together; the first of them has it.
    """
    source = translated.source
    failed: CheckpointError | None = None
    others = sorted(set(sharing.leaders) - {sharing.leaders[source]})
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
                writer.write(slots[name], [Box(zeros, tuple(value.shape), zeros)], value)
        except CheckpointError as error:  # the others go on, and so must this one
            failed = failed or error
    if failed is not None:
        raise failed
