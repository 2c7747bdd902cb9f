"""`smp.save_checkpoint`: save the state of the whole job, completely or not at all.

All ranks together::

    every rank     writes its share of what it holds to a hidden folder, counting sizes and checksums
    rank 0         makes the index of what all have written; if one failed, all clean up and raise
    leaders        write the index, rename the folder             (one rank per file system)
    leaders        write `newest`, remove checkpoints beyond `num_kept_partial_checkpoints`

With `blocking=False` a thread does this with copies of the values (`background.py`). So an interrupted save is never
visible and never harms an older checkpoint. Hosts may share the folder or have one each; each file system gets what its
own ranks need to resume, and the index, equal on all of them, lists where the rest is.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist

from smpkit.errors import CheckpointError, SmpkitError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.agreement import all_or_raise, together
from smpkit.torch.checkpoints.background import PendingSave, Snapshot, agree_after_previous_save, start
from smpkit.torch.checkpoints.entries import (
    MODEL,
    StateEntry,
    degrees,
    entries_of,
    precision,
    wrapped_model,
    writers_of,
)
from smpkit.torch.checkpoints.file_systems import FileSystems, find_file_systems, known_file_systems, make_folder
from smpkit.torch.checkpoints.objects import dump, read_file
from smpkit.torch.checkpoints.tensors import SUFFIX, write_tensors
from smpkit.torch.checkpoints.whole import write_full
from smpkit.torch.core.runtime import WrappedOptimizer, state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.init import save_group
from smpkit.torch.model import DistributedModel, replica_seed
from smpkit.torch.optimizer import DistributedOptimizer
from smpkit.torch.placement.delayed import run_deferred_loads

USER_CONTENT = "user_content"
_VERSION = metadata.version("smpkit")
_T = TypeVar("_T")


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
        user_content: of the script: numbers, strings, lists, dicts, tensors, argparse's Namespace, numpy arrays. If
            ranks pass different ones, such as their random states, each gets its own back at the same degrees; else
            all get that of rank 0.
        translate_if_full: whether a full checkpoint has the names of the script's own model, where tensor parallelism
            has replaced modules.
        num_kept_partial_checkpoints: after this save, keep this many of the newest complete partial checkpoints.
        blocking: False: copy what is to be saved to host memory and return; a thread writes the copies while training
            goes on. The result's `wait()` returns when the checkpoint is complete, or raises why it was not saved. The
            next save, resuming and `smp.shutdown()`, also at the end of the script, do the same. Only with `partial`.

    Raises:
        CheckpointError: on all ranks, if one could not write its part or read `user_content` back; it names the rank.
        UsageError: there is no model, the tag is no file name, or ranks gave different tags.
    """
    files.check_tag(tag)
    if tag.endswith(files.PARTIAL):
        raise UsageError(
            f"{tag!r} cannot be the tag of a new checkpoint: smpkit adds `{files.PARTIAL}` itself",
            hint=f"save as {tag.removesuffix(files.PARTIAL)!r}",
        )
    kept: Any = num_kept_partial_checkpoints
    if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or kept < 1):
        raise UsageError(f"num_kept_partial_checkpoints is {kept!r}", hint="use a whole number of at least 1, or None")
    if not blocking and not partial:
        raise UsageError(
            "blocking is False with partial=False: only partial checkpoints are saved in the background",
            hint="save with partial=True, or with blocking=True",
        )
    if partial and optimizer is None and state.has_several_optimizers:
        warn_user(
            "several optimizers train, and a checkpoint has the states of the one that was wrapped last: pass"
            " `state_dict()` of the others in `user_content`"
        )
    wrapped, saved_optimizer = wrapped_model(model), state.optimizer if optimizer is None else optimizer
    save = _begin(files.folder_at(path), tag, partial, kept, user_content)
    snapshot, group = (None, None) if blocking else (Snapshot(), save_group())
    part = _outcome(lambda: save.prepare(wrapped, saved_optimizer, user_content, snapshot))
    if not partial:
        with save.cleaned_up_on_failure():
            all_or_raise(save.failure, lambda: save.make_folder(part()))
            write_full(save.staged / tag, wrapped, save.failure, translate=translate_if_full)

    def finish() -> None:
        with save.cleaned_up_on_failure():
            try:
                if snapshot is not None:
                    snapshot.wait()
                save.complete(part, group)
            except SmpkitError as error:
                if blocking or isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{save.failure}; {error.message}", hint=error.hint) from error  # of a wait

    if not blocking:
        return start(tag, finish)
    finish()
    return None


def _outcome(attempt: Callable[[], _T]) -> Callable[[], _T]:
    """Call `attempt` now; return what hands out its result, or raises its error, where the other ranks are told."""
    outcome: Future[_T] = Future()
    try:
        outcome.set_result(attempt())
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result


def _begin(path: Path, tag: str, partial: bool, kept: int | None, user_content: Any) -> _Save:
    """Wait for the save before, check that all ranks make the same one now, and find out who writes where."""
    failure = f"checkpoint `{tag}` was not saved"
    known = known_file_systems(path)
    content = _digest_of_content(user_content) if partial and state.size > 1 else None
    # Before any file is touched: ranks with different tags would write to different folders.
    call = tag, partial, known is not None, content
    difference, save_id, all_know, first_content, is_common = agree_after_previous_save(call, _compare)
    if difference is not None:
        raise UsageError(difference, hint="all ranks call smp.save_checkpoint with the same tag")
    if known is None or not all_know:
        known = find_file_systems(path, save_id, failure)
    # Where rank 0's content is not, ranks that pass the same must find it, too.
    is_own = content != first_content or not (is_common or known.leader == 0)
    return _Save(path, tag, partial, save_id, known, failure, kept, content is not None and is_own)


_Call = tuple[str, bool, bool, int | None]
"""Of one rank: tag, partial, whether it knows who shares its file system, and the digest of its content."""


def _compare(calls: list[_Call]) -> tuple[str | None, str, bool, int | None, bool]:
    """Return how calls differ, an id for the save, and whether all ranks know who shares their file systems.

    Also the digest of rank 0's content, and whether all ranks that pass one pass the same.
    """
    tag, partial, _, first_content = calls[0]
    differences = (
        f"rank 0 saves {tag!r} (partial={partial}), but rank {rank} saves {other_tag!r} (partial={other_partial})"
        for rank, (other_tag, other_partial, *_) in enumerate(calls)
        if (other_tag, other_partial) != (tag, partial)
    )
    all_know = all(knows for _, _, knows, _ in calls)
    is_common = {content for *_, content in calls} <= {first_content, None}
    return next(differences, None), files.new_save_id(), all_know, first_content, is_common


def _digest_of_content(content: Any) -> int | None:
    """Return what tells the content of a rank from that of others; None if there is none, or it cannot be saved."""
    if content is None:
        return None
    try:
        dump(content, cast("IO[bytes]", file := _Checksum()))
    except Exception:  # raised by the rank that writes it
        return None
    return file.crc


class _Checksum:
    """Computes the CRC-32 of what is written to it, and keeps nothing: it may be large."""

    crc = 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return len(data)

    def flush(self) -> None: ...


# --- one save ---------------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """What one rank writes, and what the index says of that; `files` and `order` are known when all is written."""

    contents: dict[str, Callable[[IO[bytes]], object]] = field(default_factory=dict)
    """What writes each file; stays on this rank."""
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    """The file that holds each value that is no tensor."""
    digests: dict[int, int] = field(default_factory=dict)
    """Of what it divides with other ranks that hold the same, by a number for these ranks."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the index that are the same on all ranks, as they are when the script saves."""
    activations: Mapping[str, str] = field(default_factory=dict)
    random: Mapping[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    order: int = 0


@dataclass(frozen=True)
class _Save:
    """One save, as this rank sees it.

    Args:
        failure: how its errors begin.
        kept: how many checkpoints stay.
        has_own_content: whether this rank passes another `user_content` than rank 0, such as its random state.
    """

    path: Path
    tag: str
    partial: bool
    save_id: str
    file_systems: FileSystems
    failure: str
    kept: int | None
    has_own_content: bool

    @property
    def name(self) -> str:
        return f"{self.tag}{files.PARTIAL}" if self.partial else self.tag

    @property
    def staged(self) -> Path:
        """The hidden folder that it is written to."""
        return files.staging_path(self.path, self.name, self.save_id)

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes the checkpoint on its file system; a full one is on that of rank 0 only."""
        return self.file_systems.is_leader if self.partial else state.rank == 0

    @contextlib.contextmanager
    def cleaned_up_on_failure(self) -> Any:
        """Remove what was written on every rank, not only the leader, which may be gone after a failure."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self.staged, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def writing(self, what: object) -> Iterator[None]:
        """Raise CheckpointError for what cannot be written, and say what it means that this save's files are gone."""
        try:
            with files.as_checkpoint_error(f"{what} cannot be written"):
                yield
        except CheckpointError as error:
            if not isinstance(error.__cause__ or error.__context__, FileNotFoundError):
                raise
            raise CheckpointError(
                f"files are gone that it had written to {self.path}",
                hint="does another job save there, too? Each needs a folder of its own",
            ) from error

    def prepare(
        self,
        model: DistributedModel,
        optimizer: WrappedOptimizer | None,
        user_content: Any,
        snapshot: Snapshot | None,
    ) -> _Part:
        """Return what this rank writes: copies, if there is a snapshot."""
        # Parameters of an earlier resume may still have to be loaded; their values would be missing in the new files.
        run_deferred_loads()
        part = _Part(job=_about(model), activations=model.activations.saved(), random=model.random_state())
        if self.partial:
            _add_entries(part, entries_of(model, optimizer), self.file_systems, snapshot)
        if (self.publishes or self.has_own_content) and user_content is not None:
            content = _as_bytes(user_content) if snapshot else lambda file: dump(user_content, file)
            part.contents[self._content_name()] = content
        if snapshot is not None:
            snapshot.finish()
        return part

    def make_folder(self, part: _Part) -> None:
        """Make the hidden folder, which ranks may share, if this one writes to it or publishes it."""
        if not self.publishes and not part.contents:
            return
        make_folder(self.path)
        with files.as_checkpoint_error(f"{self.path} cannot be written to"):
            self.staged.mkdir(exist_ok=True)

    def _content_name(self) -> str:
        if not self.partial:
            return f"{USER_CONTENT}_{self.tag}"
        if self.has_own_content:
            return own_content_name()
        return f"{USER_CONTENT}_{state.rank}.pt" if state.rank else f"{USER_CONTENT}.pt"

    def complete(self, part: Callable[[], _Part], group: dist.ProcessGroup | None) -> None:
        """Write this rank's files, and make the checkpoint visible when all ranks have written theirs."""
        _, (index, order, is_divided) = together(
            self.failure, lambda: _write_files(self, part()), lambda parts: _index_of(self, parts), group
        )
        if self.partial:  # before it is published: that may fail on one host, and the others have it
            self.file_systems.last_order = order
        # Only after all ranks have written: a rename makes the checkpoint visible.
        all_or_raise(self.failure, lambda: self._publish(index), group)
        # From here on the checkpoint is visible, so a failure must not remove it: the hidden folder has been renamed.
        unmarked = f"checkpoint `{self.tag}` is saved, but not marked as newest"
        all_or_raise(unmarked, self._mark_newest, group)
        if is_divided and state.rank == 0:
            warn_user(
                f"each host keeps the parts of its own ranks in a {self.path} of its own: these hosts can resume with"
                " these degrees; for others, bring the files of all hosts together in one folder, or save on a file"
                " system that all hosts share"
            )

    def _publish(self, index: str) -> None:
        """Make the checkpoint visible on this rank's file system."""
        if not self.publishes:
            return
        with self.writing(self.path / self.name):
            if self.partial:
                files.publish_folder(self.staged, self.path / self.name, index)
                return
            content = self._content_name()
            # The model last: until its rename, an older checkpoint of this tag is what a reader sees.
            if (self.staged / content).exists():
                (self.staged / content).replace(self.path / content)
            else:
                (self.path / content).unlink(missing_ok=True)  # an older save's does not belong to this model
            (self.staged / self.tag).replace(self.path / self.tag)
            files.sync_folder(self.path)
            self.staged.rmdir()

    def _mark_newest(self) -> None:
        """Write `newest`, and only then remove old checkpoints."""
        if not self.publishes:
            return
        with self.writing(self.path / files.NEWEST):
            files.atomic_write(self.path / files.NEWEST, lambda file: file.write(f"{self.name}\n".encode()))
        if not self.partial or self.kept is None:
            return
        for name in files.complete_partials(self.path)[self.kept :]:
            # Rename first: a removal that is interrupted must leave nothing that looks like a checkpoint.
            doomed = files.staging_path(self.path, name, self.save_id)
            with contextlib.suppress(OSError):
                (self.path / name).rename(doomed)
                shutil.rmtree(doomed)


def own_content_name() -> str:
    """Return the name of the file with this rank's own `user_content`, which only as many ranks can use."""
    return f"{USER_CONTENT}_{state.rank}of{state.size}.pt"


def _about(model: DistributedModel) -> dict[str, Any]:
    """Return what an index says of the job, the same on all ranks."""
    assignment = model.pipeline.assignment if model.pipeline is not None else None
    return {
        "degrees": degrees(),
        "precision": precision(),
        "smpkit": _VERSION,
        "partition": None if assignment is None else str(assignment.to_json()),
    }


def _random_of(parts: list[_Part]) -> dict[str, int]:
    """Return the random state of the job: that of the first rank, and the seeds of replicas that have others."""
    random = dict(parts[0].random)
    for rank, part in enumerate(parts):
        if part.random.get("seed") != random.get("seed"):
            random[replica_seed(state.mesh.coordinates(rank).rdp)] = part.random["seed"]
    return random


def _write_files(save: _Save, part: _Part) -> _Part:
    """Write a rank's files; return the part with their sizes and checksums, without the contents."""
    order = files.next_order(save.path, save.file_systems.last_order) if save.partial and save.publishes else 1
    save.make_folder(part)
    written = {}
    for name, content in part.contents.items():
        with save.writing(name):
            size, crc = files.fsync_write(save.staged / name, content)
        if name.startswith(USER_CONTENT):
            read_file(save.staged / name, "cpu")  # whoever resumes must be able to
        place = {"rank": state.rank, "host": socket.gethostname(), "folder": save.file_systems.leader}
        written[name] = {"size": size, "crc32": crc, **place}
    return replace(part, contents={}, files=written, order=order)


def _as_bytes(content: Any) -> Callable[[IO[bytes]], object]:
    """Return what writes an object as it is now."""
    buffer = io.BytesIO()
    dump(content, buffer)
    return lambda file: file.write(buffer.getbuffer())


def _add_entries(part: _Part, entries: list[StateEntry], file_systems: FileSystems, snapshot: Snapshot | None) -> None:
    """Add this rank's share of what it holds: a file of tensors and one of other values, of the model and otherwise."""
    by_memory: dict[object, StateEntry] = {}
    first = {entry.name: by_memory.setdefault(_memory_of(entry), entry) for entry in entries}
    items = [(entry.name, entry.num_bytes, entry.writers(file_systems.here)) for entry in by_memory.values()]
    writers = writers_of(items)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    values: dict[str, dict[str, Any]] = {}
    coordinates = state.mesh.coordinates(state.rank)
    for entry in entries:
        if writers.get(first[entry.name].name) != state.rank:
            continue
        kind = "model" if entry.name.startswith(MODEL) else "optimizer"
        stem = f"{kind}_{coordinates.pp}_{coordinates.tp}_{coordinates.rdp}"
        if entry.shape is None:
            values.setdefault(f"{stem}.pt", {})[entry.name] = entry.value
            part.objects[entry.name] = f"{stem}.pt"
            continue
        # A tied weight has one copy, under the first of its names.
        key, name = first[entry.name].name_in_file, f"{stem}{SUFFIX}"
        if key not in (file := tensors.setdefault(name, {})):
            file[key] = entry.value if snapshot is None else snapshot.copy(entry.name, entry.value)
        part.tensors[entry.name] = {
            "dtype": str(entry.value.dtype).removeprefix("torch."),
            "shape": entry.shape,
            "pieces": [[name, key, chunk.offsets, chunk.sizes, chunk.local_start] for chunk in entry.chunks],
        }
    for name, content in tensors.items():
        part.contents[name] = lambda file, content=content: write_tensors(file, content)  # type: ignore[misc]
    for name, objects_in_file in values.items():
        part.contents[name] = _as_bytes(objects_in_file)
    part.digests = _digests_of(items, first)


def _memory_of(entry: StateEntry) -> object:
    """Return what the names of one tensor have in common."""
    value = entry.value
    if not entry.num_bytes:
        return entry.name
    return value.data_ptr(), value.shape, value.stride(), value.dtype, entry.name.startswith(MODEL)


def _digests_of(items: list[tuple[str, int, frozenset[int]]], first: Mapping[str, StateEntry]) -> dict[int, int]:
    """Return for each set of ranks that hold the same, as a number, what they divide among them, likewise.

    Args:
        first: by name, the first entry of the same tensor.
    """
    ties: dict[str, list[str]] = {}
    for name, entry in first.items():
        ties.setdefault(entry.name, []).append(name)
    divided: dict[frozenset[int], list[object]] = {}
    for name, size, holders in sorted(items, key=lambda item: item[0]):
        if len(holders) > 1:
            divided.setdefault(holders, []).append((ties[name], size))

    def digest(content: object) -> int:
        return zlib.crc32(repr(content).encode())

    return {digest(sorted(holders)): digest(content) for holders, content in divided.items()}


def _index_of(save: _Save, parts: list[_Part]) -> tuple[str, int, bool]:
    """Return the index of what all ranks have written, its order, and whether a file system lacks something of it.

    Ranks that should hold the same and do not are an error: what they leave to each other would be missing.
    """
    written: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    objects: dict[str, list[str]] = {}
    digests: dict[int, tuple[int, int]] = {}
    for rank, part in enumerate(parts):
        for holders, digest in part.digests.items():
            other, expected = digests.setdefault(holders, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"ranks {other} and {rank} hold the same part of the model, but not the same states of it",
                    hint="replicas that train independently keep the same states of the same parameters, or are saved"
                    " with smp.save",
                )
        written |= part.files
        for name, spec in part.tensors.items():
            tensors.setdefault(name, {**spec, "pieces": []})["pieces"] += spec["pieces"]
        for name, file in part.objects.items():
            objects.setdefault(name, []).append(file)
    index = files.Index(
        tag=save.tag,
        save_id=save.save_id,
        order=max(part.order for part in parts),
        files=written,
        tensors=tensors,
        objects=objects,
        activations={name: choice for part in parts for name, choice in part.activations.items()},
        random=_random_of(parts),
        **parts[0].job,
    )
    folders: dict[object, set[int]] = {}
    for name, spec in tensors.items():
        for file, _, offsets, *_ in spec["pieces"]:
            folders.setdefault((name, tuple(offsets)), set()).add(written[file]["folder"])
    num_folders = len({entry["folder"] for entry in written.values()})
    return index.to_text(), index.order, any(len(holding) < num_folders for holding in folders.values())
