"""The whole model's tensors under the names of the script's own model, though tensor parallelism replaced parts of it.

What a module became has a translation back, which makes one whole tensor after the other from whole tensors. Here these
are brought together from the ranks when the translation asks for them, so that at no time there is more than one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smpkit.errors import CheckpointError
from smpkit.plan.mesh import Coordinates
from smpkit.torch.checkpoints.file_systems import FileSystems
from smpkit.torch.checkpoints.folder import as_checkpoint_error
from smpkit.torch.checkpoints.save_load import read_file
from smpkit.torch.checkpoints.state_entries import (
    MODEL,
    Chunk,
    Model,
    StateEntry,
    all_or_raise,
    model_entries,
    runs_of,
    view_of,
)
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import allgather, recv_from, send
from smpkit.torch.placement.dtensor import full_tensor_of
from smpkit.torch.placement.shards import shard_of
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.registry import TensorOrFactory, Translation
from smpkit.torch.tensor_parallel.state_dict import join_state, replaced_modules

__all__ = ["FileSlot", "FullState", "TranslatedModule", "full_state_of", "write_slots", "write_whole_file"]


@dataclass(frozen=True)
class TranslatedModule:
    """A module that took the place of another one.

    Args:
        prefix: what the names of its state begin with.
        source: the rank that writes what is made of it.
        pp_sources: the pipeline rank that provides each tensor of its state, where that is not the source's.
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
        # What sharded data parallelism divides, all replicas bring together, each for itself.
        together = state.cfg.sharded_data_parallel_degree > 1
        return mine.pp in {theirs.pp, *self.pp_sources.values()} and (together or mine.rdp == theirs.rdp)

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what the translation makes, by name; computed without data."""
        made = {name: make() for name, make in self._translated(_MetaState(self.module))}
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what the translation makes, in its order."""
        return tuple(self.tensors)

    def gathered(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield names with what makes each tensor; all ranks that take part make all of them, in this order.

        Only the source gets values; the others, tensors without data.
        """
        return self._translated(_GatheredState(self.module, self.pp_sources, state.mesh.coordinates(self.source).pp))

    def _translated(self, values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, made in self.translation(values, self.module):
            yield self.prefix + name, _maker(made)


def _maker(made: TensorOrFactory) -> Callable[[], torch.Tensor]:
    return made if callable(made) else lambda: made


@dataclass(frozen=True)
class FullState:
    """What the whole model's state dict has.

    Args:
        tensors: shape and dtype by name.
        modules: where some of them come from.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    modules: tuple[TranslatedModule, ...] = field(default=())

    @cached_property
    def translated(self) -> frozenset[str]:
        """The names of what translations make."""
        return frozenset(name for module in self.modules for name in module.names)


def full_state_of(model: Model, *, translate: bool) -> FullState:
    """Return what the whole model's state dict has, the same on all ranks.

    Args:
        translate: under the script's own names, where a translation is known.
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


def _translated_modules(model: Model) -> Iterator[TranslatedModule]:
    for name, module, entry in replaced_modules(model.module):
        if entry.from_distributed is not None:
            source, pp_sources = _pp_sources_of(model, module)
            rank = state.mesh.rank(Coordinates(pp=source, tp=0, rdp=0))
            yield TranslatedModule(f"{name}." if name else "", module, entry.from_distributed, rank, pp_sources)


def _pp_sources_of(model: Model, module: nn.Module) -> tuple[int, Mapping[str, int]]:
    """Return the pipeline rank that a module is put together on, and what of its state comes from which other one.

    That is the lowest rank that holds all of it; a module whose parts lie on several has none.
    """
    if model.pipeline is None or not model.partitioned:
        return 0, {}
    holders = {name: model.pipeline.holders[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
    common = frozenset.intersection(*holders.values())
    source = min(common) if common else min(map(min, holders.values()))
    return source, {name: min(ranks) for name, ranks in holders.items() if source not in ranks}


class _MetaState(Mapping[str, torch.Tensor]):
    """The whole state of a module, without data."""

    def __init__(self, module: nn.Module) -> None:
        self._values = {
            name: torch.empty(global_shape(value), dtype=value.dtype, device="meta")
            for name, value in module.state_dict(keep_vars=True).items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _GatheredState(_MetaState):
    """The whole state of a module on the first of the tensor-parallel ranks that ask together, without data elsewhere.

    The last tensor is kept, because the parts of a packed one are asked for one after the other.
    """

    def __init__(self, module: nn.Module, pp_sources: Mapping[str, int], source: int) -> None:
        super().__init__(module)
        self._module = module
        self._homes = pp_sources
        self._source = source
        self._own = module.state_dict(keep_vars=True)
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self._fetched(name)
        return self._last[1]

    def _fetched(self, name: str) -> torch.Tensor:
        """Return the tensor on the first rank of the source's, wherever in the pipeline it comes from."""
        pp_source = self._homes.get(name, self._source)
        value = self._full_tensor(name) if state.pp_rank == pp_source else self._values[name]
        if pp_source == self._source or state.tp_rank > 0:
            return value
        if state.pp_rank == pp_source:
            send(value, state.mesh.rank(Coordinates(self._source, 0, state.rdp_rank)))
            return self._values[name]
        if state.pp_rank == self._source:
            whole: torch.Tensor = recv_from(state.mesh.rank(Coordinates(pp_source, 0, state.rdp_rank)))
            return whole
        return value

    def _full_tensor(self, name: str) -> torch.Tensor:
        value = full_tensor_of(self._own[name])
        shard = shard_of(self._own[name])
        if shard is not None and shard.is_distributed:
            found = join_state(self._module, {name: value.detach()}, on_first=True)
            return found[name] if state.tp_rank == 0 else self._values[name]
        return value.detach() if state.tp_rank == 0 else self._values[name]


# --- Write files that hold the whole model, though no rank does: each writes its chunks where they belong -------------
# First somebody makes the file with the space for every tensor. Then, tensor by tensor, each rank writes the chunks
# that it holds, contiguous run by run, straight to their place; what no rank on a file system holds is sent to its
# leader. So a rank needs memory for one tensor at a time.


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
