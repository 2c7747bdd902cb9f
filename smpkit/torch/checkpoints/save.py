"""`smp.save_checkpoint`: save the state of the whole job, completely or not at all.

All ranks together::

    every rank     writes to a hidden folder what no lower rank on its file system holds
    all            agree: if one failed, all clean up and raise
    leaders        write the index, rename the folder             (one rank per file system)
    all            agree
    leaders        write `newest`, remove checkpoints beyond `num_kept_partial_checkpoints`

With `blocking=False` a thread does this with copies of the values (`background.py`), from the files on; what all ranks
must say before is exchanged before.

So an interrupted save is never visible and never harms an older checkpoint. Hosts may share the folder or have one
each; each file system gets what its own ranks need to resume, and the index lists where the rest is. The index and
`pieces.json` are equal on all of them, and a name never stands for two contents: so whatever copies the hosts' folders
into one, as SageMaker does with checkpoints in S3, makes one checkpoint of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from smpkit.errors import UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints import objects, safetensors
from smpkit.torch.checkpoints.background import (
    Gather,
    PendingSave,
    Snapshot,
    StoreGather,
    finish_previous_save,
    start,
)
from smpkit.torch.checkpoints.file_systems import FileSystems, find_file_systems
from smpkit.torch.checkpoints.integrity import crc_of, whole_file
from smpkit.torch.checkpoints.reader import PIECES, describe, merge_pieces, with_names
from smpkit.torch.checkpoints.save_load import read_file
from smpkit.torch.checkpoints.state_entries import (
    StateEntry,
    all_or_raise,
    degrees,
    model_entries,
    optimizer_entries,
    wrapped_model,
)
from smpkit.torch.checkpoints.whole import write_full
from smpkit.torch.core.runtime import WrappedOptimizer, state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.model import DistributedModel
from smpkit.torch.optimizer import DistributedOptimizer
from smpkit.torch.placement.delayed import run_deferred_loads

__all__ = ["USER_CONTENT", "save_checkpoint"]

USER_CONTENT = "user_content.pt"


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    blocking: bool = True,
) -> PendingSave | None:
    """Save the job's state under `path`; called by all ranks.

    Args:
        path: a folder, created if missing.
        tag: name of this checkpoint; an older one of the same name is replaced.
        partial: True: each rank's part in `{tag}_partial/`, from which training resumes exactly. False: the whole model
            in one file, without the optimizer.
        model: the wrapped model; the last one that was wrapped if not given.
        optimizer: the wrapped optimizer; the last one that was wrapped if not given; none is saved if there is none.
        user_content: of the script: numbers, strings, lists, dicts, tensors, argparse's Namespace, numpy arrays.
        translate_if_full: whether a full checkpoint has the names of the script's own model, where tensor parallelism
            has replaced modules.
        num_kept_partial_checkpoints: after this save, keep this many of the newest complete partial checkpoints.
        blocking: False: copy what is to be saved to host memory and return; a thread writes the copies while training
            goes on. The result's `wait()` returns when the checkpoint is complete. The next save, resuming and
            `smp.shutdown()`, also at the end of the script, wait for it, and raise its error. Only with `partial`.

    Raises:
        CheckpointError: on all ranks, if one could not write its part or read `user_content` back; it names the rank.
        UsageError: there is no model, the tag is no file name, or ranks gave different tags.
    """
    files.check_tag(tag)
    _check_kept(num_kept_partial_checkpoints)
    if not blocking and not partial:
        raise UsageError(
            "blocking is False with partial=False: only partial checkpoints are saved in the background",
            hint="save with partial=True, or with blocking=True",
        )
    finish_previous_save()
    job = _Job(wrapped_model(model), optimizer or state.optimizer, user_content)
    failure = f"checkpoint `{tag}` was not saved"
    save = _begin(Path(path), tag, partial, failure)
    try:
        # Parameters of an earlier resume may still have to be loaded; their values would be missing in the new files.
        all_or_raise(failure, run_deferred_loads)
        if not partial:
            write_full(save.staged / tag, job.model, failure, translate=translate_if_full)
        snapshot = None if blocking else Snapshot()
        own = all_or_raise(failure, lambda: _prepare(save, job, snapshot))
        contents = _Contents(
            own, allgather(_Part.of(own, job.model)), job.model.random_state(), _partition_of(job.model)
        )
        if snapshot is None:
            _complete(save, contents, failure, num_kept_partial_checkpoints, allgather)
            return None
        return start(tag, lambda: _complete_later(save, contents, failure, num_kept_partial_checkpoints, snapshot))
    except BaseException:
        # On every rank, not only the leader, which may be gone after a failure.
        shutil.rmtree(save.staged, ignore_errors=True)
        raise


# --- steps ------------------------------------------------------------------------------------------------------------


def _check_kept(kept: object) -> None:
    if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or kept < 1):
        raise UsageError(f"num_kept_partial_checkpoints is {kept!r}", hint="use a whole number of at least 1, or None")


@dataclass(frozen=True)
class _Job:
    """What to save."""

    model: DistributedModel
    optimizer: WrappedOptimizer | None
    user_content: Any


@dataclass(frozen=True)
class _Save:
    """One save, as this rank sees it."""

    path: Path
    tag: str
    partial: bool
    save_id: str
    file_systems: FileSystems

    @property
    def name(self) -> str:
        """Name of the folder or file of the checkpoint."""
        return f"{self.tag}{files.PARTIAL}" if self.partial else self.tag

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes the checkpoint on its file system; a full one is on that of rank 0 only."""
        return self.file_systems.is_leader if self.partial else state.rank == 0

    @property
    def staged(self) -> Path:
        """The hidden folder that it is written to."""
        return files.staging_folder(self.path, self.name, self.save_id)


@dataclass(frozen=True)
class _File:
    """A file that this rank writes: what is in it, and where that belongs, as in `pieces.json`."""

    name: str
    content: Any
    pieces: dict[str, Any] = field(default_factory=dict)
    is_from_user: bool = False


_Written = Mapping[str, tuple[int, int]]
"""Sizes and checksums of files by their names."""


@dataclass(frozen=True)
class _Part:
    """What one rank writes, for the others."""

    host: str
    pieces: Mapping[str, Any]
    activations: Mapping[str, str]
    """What its layers do, by name."""

    @classmethod
    def of(cls, own: Sequence[_File], model: DistributedModel) -> _Part:
        """Describe this rank's files."""
        return cls(socket.gethostname(), merge_pieces(each.pieces for each in own), model.activations.saved())


@dataclass(frozen=True)
class _Contents:
    """What a checkpoint will hold, fixed before anything is written.

    Args:
        own: this rank's files.
        parts: of all ranks.
        random: of the index.
        partition: of the index.
    """

    own: Sequence[_File]
    parts: Sequence[_Part]
    random: Mapping[str, int]
    partition: str | None


def _begin(path: Path, tag: str, partial: bool, failure: str) -> _Save:
    """Check that all ranks make the same save, find out who writes where, and make the hidden folder."""
    # Before any file is touched: ranks with different tags would write to different folders.
    calls = allgather((tag, partial, files.new_save_id()))
    for rank, (their_tag, their_partial, _) in enumerate(calls):
        if (their_tag, their_partial) != (tag, partial):
            raise UsageError(
                f"rank {state.rank} saves {tag!r} (partial={partial}), but rank {rank} saves {their_tag!r} "
                f"(partial={their_partial})",
                hint="all ranks call smp.save_checkpoint with the same tag",
            )
    save_id = calls[0][2]  # rank 0's, on all ranks
    save = _Save(path, tag, partial, save_id, find_file_systems(path, save_id, failure))
    all_or_raise(failure, lambda: _stage(save))
    return save


def _stage(save: _Save) -> None:
    if save.publishes:
        with files.as_checkpoint_error(f"{save.path} cannot be written to"):
            files.remove_leftovers(save.path, save.save_id)
            save.staged.mkdir(exist_ok=True)


def _prepare(save: _Save, job: _Job, snapshot: Snapshot | None) -> list[_File]:
    """Return what this rank writes: its part of a partial checkpoint, and the user content."""
    found: list[_File] = []
    if save.partial:
        found += _prepare_part(save, "model", model_entries(job.model), snapshot)
    if save.partial and job.optimizer is not None:
        entries = optimizer_entries(job.optimizer, job.model)
        exact = [entry for entry in entries if not entry.is_of_half_precision]
        found += _prepare_part(save, "optimizer", exact, snapshot)
        if half := [entry for entry in entries if entry.is_of_half_precision]:
            found += _prepare_part(save, "fp16_states", half, snapshot)
    if save.publishes and job.user_content is not None:
        name = USER_CONTENT if save.partial else f"user_content_{save.tag}"
        content = job.user_content if snapshot is None else snapshot.copy(job.user_content)
        found.append(_File(name, content, is_from_user=True))
    if snapshot is not None:
        snapshot.finish()
    return found


def _prepare_part(save: _Save, kind: str, entries: Sequence[StateEntry], snapshot: Snapshot | None) -> Sequence[_File]:
    """Return the files of the entries that this rank writes on its file system, if it writes any."""
    own = [entry for entry in entries if save.file_systems.writer(entry.holders) == state.rank]
    replicas = frozenset(rank for rank in range(state.size) if _pp_tp(rank) == _pp_tp(state.rank))
    # There is a file for each pipeline and tensor-parallel rank, even an empty one.
    if not own and save.file_systems.writer(replicas) != state.rank:
        return []
    name = f"{kind}_{_rank_info(kind)}"
    tensors, others = _File(f"{name}{safetensors.SUFFIX}", {}, {}), _File(f"{name}.pt", {}, {})
    names_of_memory: dict[object, str] = {}
    for entry in own:
        value = entry.value if snapshot is None else snapshot.copy(entry.value)
        if safetensors.is_storable(value):
            # A tied weight has one copy, under the first of its names.
            memory = value.data_ptr(), value.shape, value.stride(), value.dtype
            file, key = tensors, names_of_memory.setdefault(memory, entry.name_in_file)
        else:
            file, key = others, entry.name
        file.content[key] = value
        file.pieces[entry.name] = describe(entry, file.name, key)
    return [tensors, others] if others.content else [tensors]


def _complete_later(save: _Save, contents: _Contents, failure: str, kept: int | None, snapshot: Snapshot) -> None:
    """Write the copies, in the thread of a save in the background."""
    with StoreGather(save.save_id, save.tag) as gather:
        snapshot.wait()
        _complete(save, contents, failure, kept, gather)


def _complete(save: _Save, contents: _Contents, failure: str, kept: int | None, gather: Gather) -> None:
    """Write this rank's files, and make the checkpoint visible when all ranks have."""
    try:
        own = all_or_raise(failure, lambda: (_write_files(save, contents.own), _highest_order(save)), gather)
        written, orders = zip(*gather(own), strict=True)
        order = 1 + max(orders)  # a count, not a time: clocks of restarted hosts can go back
        # Publish only after all ranks have written: a rename makes the checkpoint visible.
        all_or_raise(failure, lambda: _publish(save, contents, written, order), gather)
    except BaseException:
        shutil.rmtree(save.staged, ignore_errors=True)
        raise
    # From here on the checkpoint is visible, so a failure must not remove it.
    unmarked = f"checkpoint `{save.tag}` is saved, but not marked as newest"
    all_or_raise(unmarked, lambda: _mark_newest(save, kept), gather)


def _write_files(save: _Save, own: Sequence[_File]) -> _Written:
    """Write this rank's files; return the size and the checksum of each."""
    return {each.name: _write(save.staged / each.name, each) for each in own}


def _partition_of(model: DistributedModel) -> str | None:
    assignment = model.pipeline.assignment if model.pipeline is not None else None
    return None if assignment is None else str(assignment.to_json())


def _rank_info(kind: str) -> str:
    """Return what tells ranks apart in a file's name: with the replica's rank if replicas hold different parts."""
    divided = state.cfg.sharded_data_parallel_degree > 1 or (kind != "model" and state.cfg.shard_optimizer_state)
    coordinates = (*_pp_tp(state.rank), state.rdp_rank) if divided else _pp_tp(state.rank)
    return "_".join(map(str, coordinates))


def _pp_tp(rank: int) -> tuple[int, int]:
    coordinates = state.mesh.coordinates(rank)
    return coordinates.pp, coordinates.tp


def _write(path: Path, file: _File) -> tuple[int, int]:
    with files.as_checkpoint_error(f"{path.name} cannot be written"):
        if path.suffix == safetensors.SUFFIX:
            return safetensors.write_tensors(path, file.content)
        size = files.fsync_write(path, lambda written: objects.dump(file.content, written))
        crc = crc_of(whole_file(path, 0)) if torch.serialization.get_crc32_options() else 0
    if file.is_from_user:
        read_file(path, "cpu")  # warns now of objects that would not be loaded
    return size, crc or 0


def _highest_order(save: _Save) -> int:
    """Return the count of the newest checkpoint on this rank's file system."""
    if not (save.partial and save.file_systems.is_leader):
        return 0
    return max((index.order for _, index in files.complete_partials(save.path)), default=0)


def _publish(save: _Save, contents: _Contents, written: Sequence[_Written], order: int) -> None:
    """Make the checkpoint visible on this rank's file system.

    Args:
        written: by each rank.
        order: of the index.
    """
    # The folder is gone if another leader on this file system, which saw our marker late, has published it.
    if not save.publishes or not save.staged.exists():
        return
    with files.as_checkpoint_error(f"{save.path / save.name} cannot be written"):
        if save.partial:
            _finish_folder(save, contents, written, order)
            files.publish_folder(save.staged, save.path / save.name)
        else:
            _publish_full(save)


def _finish_folder(save: _Save, contents: _Contents, written: Sequence[_Written], order: int) -> None:
    """Write `pieces.json` and the index of a partial checkpoint, including files on other file systems."""
    sizes, checksums, names = _name_files(save.file_systems, written)
    for rank in save.file_systems.here:
        for name, final in names[rank].items():
            (save.staged / name).rename(save.staged / final)
    parts = [with_names(part.pieces, names[rank]) for rank, part in enumerate(contents.parts)]
    pieces = json.dumps(merge_pieces(parts)).encode()
    sizes[PIECES] = files.fsync_write(save.staged / PIECES, lambda file: file.write(pieces))
    checksums[PIECES] = zlib.crc32(pieces)
    writers = [f"rank {rank} on {part.host}" for rank, part in enumerate(contents.parts)]
    hosts = [
        {PIECES: writers[leader]}
        | {name: writers[rank] for rank in save.file_systems.ranks_led_by(leader) for name in names[rank].values()}
        for leader in sorted(set(save.file_systems.leaders))
    ]
    index = files.Index(
        tag=save.tag,
        save_id=save.save_id,
        order=order,
        degrees=degrees(),
        smpkit=metadata.version("smpkit"),
        files=sizes,
        hosts=hosts if len(hosts) > 1 else (),
        random=contents.random,
        partition=contents.partition,
        activations={name: choice for part in contents.parts for name, choice in part.activations.items()},
        checksums=checksums,
    )
    files.write_index(save.staged, index)
    if {*itertools.chain(*written)} > {name for rank in save.file_systems.here for name in written[rank]}:
        warn_user(
            f"each host keeps the parts of its own ranks in a {save.path} of its own: these hosts can resume with these"
            " degrees; for others, bring the files of all hosts together in one folder, or save on a file system that"
            " all hosts share",
        )


def _name_files(
    file_systems: FileSystems, written: Sequence[_Written]
) -> tuple[dict[str, int], dict[str, int], list[dict[str, str]]]:
    """Return sizes and checksums of all files, and for each rank the final names of those that it has written.

    Replicas on different hosts write files of the same name. Where the contents differ, as buffers and what scripts
    save may, those that are not the first have the rank of their host's leader in their names.
    """
    known: dict[str, tuple[int, int]] = {}
    names = []
    for leader, own in zip(file_systems.leaders, written, strict=True):
        names.append({name: name for name in own})
        for name, (size, crc) in own.items():
            if known.setdefault(name, (size, crc)) != (size, crc):
                path = Path(name)
                names[-1][name] = f"{path.stem}.host_{leader}{path.suffix}"
                known[names[-1][name]] = size, crc
    return {name: size for name, (size, _) in known.items()}, {name: crc for name, (_, crc) in known.items()}, names


def _publish_full(save: _Save) -> None:
    content = f"user_content_{save.tag}"
    # The model last: until its rename, an older checkpoint of this tag is what a reader sees.
    if (save.staged / content).exists():
        (save.staged / content).replace(save.path / content)
    else:
        (save.path / content).unlink(missing_ok=True)  # an older save's does not belong to this model
    (save.staged / save.tag).replace(save.path / save.tag)
    files.sync_folder(save.path)
    save.staged.rmdir()


def _mark_newest(save: _Save, kept: int | None) -> None:
    """Write `newest`, and only then remove old checkpoints."""
    if not save.publishes:
        return
    with files.as_checkpoint_error(f"{save.path / files.NEWEST} cannot be written"):
        files.atomic_write(save.path / files.NEWEST, lambda file: file.write(f"{save.name}\n".encode()))
    if save.partial and kept is not None:
        _prune(save, kept)


def _prune(save: _Save, kept: int) -> None:
    for name, _ in files.complete_partials(save.path)[kept:]:
        # Rename first: a removal that is interrupted must leave nothing that looks like a checkpoint.
        doomed = files.staging_folder(save.path, name, save.save_id)
        with contextlib.suppress(OSError):
            (save.path / name).rename(doomed)
            shutil.rmtree(doomed)
