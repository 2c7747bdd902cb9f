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
from smpkit.torch.checkpoints.places import Box, runs_of, view_of
from smpkit.torch.checkpoints.sharing import Sharing
from smpkit.torch.checkpoints.together import Model, all_succeed
from smpkit.torch.comm import allgather, recv_from, send
from smpkit.torch.saving import read_file
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.shards import shard_of

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


def write_whole_file(path: Path, model: Model, sharing: Sharing, failure: str) -> None:
    """Write a model's whole state dict as `torch.save` would, to one file on each file system; all ranks call this.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    entries = all_succeed(failure, lambda: model_entries(model))
    others = _other_things(entries)
    made = all_succeed(failure, lambda: _make_file(path, model, others) if sharing.leads else {})
    slots = allgather(made)[sharing.leaders[state.rank]]
    write_slots(slots, [entry for entry in entries if entry.shape is not None], sharing, failure)


def _other_things(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return what is no tensor in the state dicts of all ranks together."""
    own = {entry.name.removeprefix(MODEL): entry.value for entry in entries if entry.shape is None}
    return {name: value for part in allgather(own) for name, value in part.items()}


def _make_file(path: Path, model: Model, others: Mapping[str, Any]) -> dict[str, Slot]:
    """Make the file with room for all tensors; return where each is."""
    with FakeTensorMode():
        whole = _imagined(model, others)
    reserve = torch.serialization.skip_data(materialize_fake_tensors=True)
    with as_checkpoint_error(f"{path.name} cannot be written"), reserve:
        torch.save(whole, path)
    with FakeTensorMode():
        made = read_file(path)
    slots = {}
    for name, value in made.items():
        if isinstance(value, torch.Tensor):
            offset = value.untyped_storage()._checkpoint_offset  # where torch says it has left room
            assert offset is not None
            slots[f"{MODEL}{name}"] = Slot(path, offset, tuple(value.shape), value.dtype)
    return slots


def _imagined(model: Model, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state dict of tensors without memory; names of one parameter share one."""
    known: dict[int, torch.Tensor] = {}
    whole: dict[str, Any] = {}
    for name, value in model.module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            whole[name] = others[name]
            continue
        if id(value) not in known:
            shard = shard_of(value)
            known[id(value)] = torch.empty(value.shape if shard is None else shard.shape, dtype=value.dtype)
        whole[name] = known[id(value)]
    return whole


# --- writing into the space -------------------------------------------------------------------------------------------


def write_slots(slots: Mapping[str, Slot], entries: Iterable[Entry], sharing: Sharing, failure: str) -> None:
    """Write this rank's entries into their slots, and what its file system lacks; all ranks call this.

    Raises:
        CheckpointError: on all ranks, if one cannot write; it begins with `failure`.
    """
    wanted = [entry for entry in entries if entry.name in slots]
    with contextlib.closing(_Writer()) as writer:
        all_succeed(failure, lambda: _write_own(slots, wanted, sharing, writer))
        if len(set(sharing.leaders)) > 1:
            things = [(entry.name, entry.boxes, entry.holders) for entry in wanted if min(entry.holders) == state.rank]
            listed = [(source, *thing) for source, found in enumerate(allgather(things)) for thing in found]
            all_succeed(failure, lambda: _send_what_lacks(slots, wanted, listed, sharing, writer))
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


def _write_own(slots: Mapping[str, Slot], entries: Iterable[Entry], sharing: Sharing, writer: _Writer) -> None:
    for entry in entries:
        if sharing.writer(entry.holders) == state.rank:
            writer.write(slots[entry.name], entry.boxes, entry.value)


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
    slots: Mapping[str, Slot], entries: Iterable[Entry], things: Iterable[_Thing], sharing: Sharing, writer: _Writer
) -> None:
    """Bring to each file system what none of its own ranks holds: from the lowest that does to its leader."""
    values = {(entry.name, entry.boxes): entry.value for entry in entries}
    leaders = sorted(set(sharing.leaders))
    failed: CheckpointError | None = None
    # Every rank goes through the same list in the same order, so each send meets its receive, even after a failure.
    for source, name, boxes, holders in things:
        for leader in leaders:
            if holders & sharing.on(leader):
                continue
            if source == state.rank:
                send(values[name, boxes].detach(), leader)
            elif leader == state.rank:
                value = recv_from(source)
                try:
                    writer.write(slots[name], boxes, value)
                except CheckpointError as error:
                    failed = failed or error
    if failed is not None:
        raise failed
