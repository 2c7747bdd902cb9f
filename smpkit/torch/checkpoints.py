"""`smp.save_checkpoint` and `smp.resume_from_checkpoint`: the whole job's state, whole or not at all.

Saving, on all ranks together::

    every writer   writes its part into a hidden folder          (the lowest replica on each file system writes)
    all            agree: if one failed, all clean up and raise
    leaders        write the index, rename the folder             (one rank per file system)
    all            agree
    leaders        write `newest`, remove checkpoints beyond `num_kept_partial_checkpoints`

So an interrupted save is never visible and never harms an older checkpoint. Hosts may share the folder or have one
each; each file system gets what its own ranks need to resume.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from smpkit.errors import CheckpointError, SmpkitError, UsageError
from smpkit.torch import checkpoint_files as files
from smpkit.torch.comm import allgather
from smpkit.torch.saving import read_file
from smpkit.torch.state import state

__all__ = ["latest_checkpoint", "resume_from_checkpoint", "save_checkpoint"]

_USER_CONTENT = "user_content.pt"
_T = TypeVar("_T")


class _Model(Protocol):
    def local_state_dict(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any, strict: bool = ...) -> Any: ...
    def random_state(self) -> Mapping[str, int]: ...
    def load_random_state(self, kept: Mapping[str, int]) -> None: ...


class _Optimizer(Protocol):
    def local_state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


# --- the calls --------------------------------------------------------------------------------------------------------


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: _Model | None = None,
    optimizer: _Optimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save the job's state under `path`; called by all ranks.

    Args:
        path: a folder, made if missing.
        tag: name of this checkpoint; an older one of the same name is replaced.
        partial: each rank's part in `{tag}_partial/`, which can be resumed exactly; else the whole model in one file,
            without the optimizer.
        model: the wrapped model; the last one that was wrapped if not given.
        optimizer: the wrapped optimizer; the last one that was wrapped if not given; none is saved if there is none.
        user_content: what the script adds: numbers, strings, lists, dicts, tensors, argparse's Namespace, numpy arrays.
        translate_if_full: accepted for SMP v1 scripts; at tensor degree 1 the names are the script's own already.
        num_kept_partial_checkpoints: after this save, keep so many of the newest complete partial checkpoints.

    Raises:
        CheckpointError: on all ranks, if one (named) could not write its part or read `user_content` back.
        UsageError: there is no model, or the tag cannot be a file name, or ranks gave different tags.
    """
    del translate_if_full
    files.check_tag(tag)
    _check_kept(num_kept_partial_checkpoints)
    job = _Job(_the_model(model), optimizer or state.optimizer, user_content)
    save = _begin(Path(path), tag, partial)
    try:
        own = _all_succeed(f"checkpoint `{tag}` was not saved", lambda: _write_parts(save, job))
        sizes = {name: size for written in allgather(own) for name, size in written.items()}
        _all_succeed(f"checkpoint `{tag}` was not saved", lambda: _publish(save, sizes, job))
    except BaseException:
        _discard(save)
        raise
    _all_succeed(
        f"checkpoint `{tag}` is saved, but not marked as newest",
        lambda: _mark_newest(save, num_kept_partial_checkpoints),
    )


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Any:
    """Load a checkpoint into the wrapped model and optimizer; called by all ranks. Return the user content, or `{}`.

    Args:
        path: the folder that was given to `save_checkpoint`.
        tag: the newest one if not given.
        partial: a checkpoint of parts; else one file, `path/tag`, which may be a plain `torch.save` of a state dict.
        strict: names must match exactly.
        load_optimizer: load the optimizer's state too, if the checkpoint is partial.
        load_sharded_optimizer_state: accepted for SMP v1 scripts; nothing is sharded in this version.
        translate_function: applied to the state dict of a full checkpoint before it is loaded.

    Raises:
        CheckpointError: on all ranks, if there is no such checkpoint, or it is damaged, or belongs to another model.
        UsageError: there is no model.
    """
    del load_sharded_optimizer_state
    model, folder = _the_model(None), Path(path)
    name = _choose(folder, tag, partial)
    optimizer = state.optimizer if load_optimizer else None

    def load() -> Any:
        if partial:
            return _load_partial(folder / name, model, optimizer, strict)
        return _load_full(folder, name, model, strict, translate_function)

    return _all_succeed(f"checkpoint `{name}` in {folder} was not loaded", load)


def latest_checkpoint(path: str | os.PathLike[str], partial: bool = True) -> str | None:
    """Return the name of the newest complete checkpoint in a folder, or None; for "resume if there is something".

    ::

        if smp.latest_checkpoint(path) is not None:
            content = smp.resume_from_checkpoint(path)

    Says what this rank sees, and waits for nobody. When `newest` names an incomplete checkpoint, the newest complete
    one is returned, with a warning. `partial` as in `resume_from_checkpoint`.
    """
    folder = Path(path)
    names, newest = _usable(folder, partial), files.read_newest(folder)
    if not names:
        return None
    _warn_if_not_newest(folder, names[0], newest, partial)
    return names[0]


def _warn_if_not_newest(folder: Path, chosen: str, newest: str | None, partial: bool) -> None:
    if newest is not None and newest != chosen and newest.endswith(files.PARTIAL) == partial:
        text = f"{folder / files.NEWEST} names `{newest}`, which is missing or incomplete: `{chosen}` is used"
        warnings.warn(text, UserWarning, stacklevel=4)


# --- saving -----------------------------------------------------------------------------------------------------------


def _check_kept(kept: object) -> None:
    if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or kept < 1):
        raise UsageError(f"num_kept_partial_checkpoints is {kept!r}", hint="use a whole number of at least 1, or None")


@dataclass(frozen=True)
class _Job:
    """What is saved."""

    model: _Model
    optimizer: _Optimizer | None
    user_content: Any


@dataclass(frozen=True)
class _Save:
    """One save, as this rank sees it.

    Args:
        writes: this rank writes its own part: it is the lowest replica on its file system.
        leads: this rank makes the checkpoint visible on its file system, where it is the lowest rank.
    """

    path: Path
    tag: str
    partial: bool
    save_id: str
    writes: bool
    leads: bool

    @property
    def name(self) -> str:
        """Name of the folder or file that appears."""
        return f"{self.tag}{files.PARTIAL}" if self.partial else self.tag

    @property
    def staged(self) -> Path:
        """Where it is written first."""
        return files.staging_folder(self.path, self.name, self.save_id)


def _begin(path: Path, tag: str, partial: bool) -> _Save:
    """Meet the other ranks, check that all mean the same save, and find out who writes."""
    meant = allgather((tag, partial, files.new_save_id()))
    for rank, (their_tag, their_partial, _) in enumerate(meant):
        if (their_tag, their_partial) != (tag, partial):
            raise UsageError(
                f"rank {state.rank} saves {tag!r} (partial={partial}), but rank {rank} saves {their_tag!r} "
                f"(partial={their_partial})",
                hint="all ranks call smp.save_checkpoint with the same tag",
            )
    save_id = meant[0][2]
    _all_succeed(f"checkpoint `{tag}` was not saved", lambda: _make_folder(path))
    lowest = _lowest_ranks_here(path, tag, save_id)
    here = [rank for rank, leader in enumerate(lowest) if leader == lowest[state.rank]]
    mine = state.mesh.coordinates(state.rank)
    replicas = [rank for rank in here if _part(rank) == (mine.pp, mine.tp)]
    save = _Save(path, tag, partial, save_id, writes=state.rank == replicas[0], leads=state.rank == here[0])
    _all_succeed(f"checkpoint `{tag}` was not saved", lambda: _stage(save))
    return save


def _part(rank: int) -> tuple[int, int]:
    place = state.mesh.coordinates(rank)
    return place.pp, place.tp


def _make_folder(path: Path) -> None:
    with files.as_checkpoint_error(f"the folder {path} cannot be made"):
        path.mkdir(parents=True, exist_ok=True)


def _lowest_ranks_here(path: Path, tag: str, save_id: str) -> list[int]:
    """Return, for each rank, the lowest rank that writes to the same file system: who sees whose marker.

    A file system that shows a marker late only makes a rank write what another one writes too.
    """
    marker = path / f".rank_{state.rank}.{save_id}.tmp"
    try:
        _all_succeed(f"checkpoint `{tag}` was not saved", lambda: _touch(marker) if state.local_rank == 0 else None)
        seen = [int(found.name.split(".")[1].removeprefix("rank_")) for found in path.glob(f".rank_*.{save_id}.tmp")]
        return allgather(min(seen, default=state.rank))
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)


def _touch(marker: Path) -> None:
    with files.as_checkpoint_error(f"{marker.parent} cannot be written to"):
        marker.touch()


def _stage(save: _Save) -> None:
    if save.leads:
        with files.as_checkpoint_error(f"{save.path} cannot be written to"):
            files.sweep(save.path, save.save_id)
            save.staged.mkdir(exist_ok=True)


def _write_parts(save: _Save, job: _Job) -> dict[str, int]:
    """Write what this rank has to write; return names and sizes of it."""
    # Every rank makes the state dicts, because making them may be collective. Only some write them.
    if save.partial:
        suffix = "{}_{}.pt".format(*_part(state.rank))
        parts: dict[str, Any] = {f"model_{suffix}": job.model.local_state_dict()}
        if job.optimizer is not None:
            parts[f"optimizer_{suffix}"] = job.optimizer.local_state_dict()
    else:
        parts = {save.tag: job.model.state_dict()}
    writes = save.writes if save.partial else save.leads
    sizes = {name: _write(save.staged / name, part) for name, part in parts.items()} if writes else {}
    if save.leads and job.user_content is not None:
        name = _USER_CONTENT if save.partial else f"user_content_{save.tag}"
        sizes[name] = _write_user_content(save.staged / name, job.user_content)
    return sizes


def _write(path: Path, obj: Any) -> int:
    with files.as_checkpoint_error(f"{path.name} cannot be written"):
        return files.synced_write(path, lambda file: torch.save(obj, file))


def _write_user_content(path: Path, content: Any) -> int:
    """Write the user content after checking that resuming can read it: later would be too late."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with files.as_checkpoint_error(f"{path.name} cannot be written"):
        size = files.synced_write(path, lambda file: file.write(buffer.getbuffer()))
    try:
        read_file(path, "cpu")
    except CheckpointError as error:
        raise CheckpointError(
            f"user_content could not be read back: {error.message}",
            hint="keep to numbers, strings, lists, dicts and tensors (a state_dict instead of an object)",
        ) from error
    return size


def _publish(save: _Save, sizes: dict[str, int], job: _Job) -> None:
    """Make the checkpoint visible on this rank's file system."""
    if not save.leads or not save.staged.exists():  # gone: another leader, who saw our marker late, was faster
        return
    with files.as_checkpoint_error(f"{save.path / save.name} cannot be written"):
        if save.partial:
            files.write_index(save.staged, _index(save, sizes, job))
            files.publish_folder(save.staged, save.path / save.name)
        else:
            _publish_full(save)


def _index(save: _Save, sizes: dict[str, int], job: _Job) -> files.Index:
    orders = [index.order for _, index in files.complete_partials(save.path, names=frozenset())]
    return files.Index(
        tag=save.tag,
        save_id=save.save_id,
        order=max(orders, default=0) + 1,
        degrees={"pipeline": state.pp_size, "tensor": state.tp_size},
        smpkit=metadata.version("smpkit"),
        files=sizes,
        random=job.model.random_state(),
    )


def _publish_full(save: _Save) -> None:
    content = f"user_content_{save.tag}"
    if (save.staged / content).exists():
        (save.staged / content).replace(save.path / content)
    else:
        (save.path / content).unlink(missing_ok=True)  # one of an older save would not belong to this model
    (save.staged / save.tag).replace(save.path / save.tag)
    files.sync_folder(save.path)
    save.staged.rmdir()


def _mark_newest(save: _Save, kept: int | None) -> None:
    """Write `newest`, and only then remove what it makes superfluous."""
    if not save.leads:
        return
    with files.as_checkpoint_error(f"{save.path / files.NEWEST} cannot be written"):
        files.whole_write(save.path / files.NEWEST, lambda file: file.write(f"{save.name}\n".encode()))
    if save.partial and kept is not None:
        _prune(save, kept)


def _discard(save: _Save) -> None:
    # Not only the leader: after a failure the others may be gone.
    shutil.rmtree(save.staged, ignore_errors=True)


def _prune(save: _Save, kept: int) -> None:
    for name, _ in files.complete_partials(save.path)[kept:]:
        # Renamed first, so that a removal that is interrupted leaves nothing that looks like a checkpoint.
        doomed = files.staging_folder(save.path, name, save.save_id)
        with contextlib.suppress(OSError):
            (save.path / name).rename(doomed)
            shutil.rmtree(doomed)


# --- resuming ---------------------------------------------------------------------------------------------------------


def _choose(folder: Path, tag: str | None, partial: bool) -> str:
    """Return the name of the folder or file to load: the same on all ranks."""
    if tag is not None:
        return f"{tag.removesuffix(files.PARTIAL)}{files.PARTIAL}" if partial else tag
    names = allgather((_usable(folder, partial), files.read_newest(folder)))
    common = [name for name in names[0][0] if all(name in theirs for theirs, _ in names)]
    newest = names[0][1]
    if not common:
        raise CheckpointError(f"there is no complete checkpoint in {folder}", hint="ask smp.latest_checkpoint")
    chosen: str = newest if newest in common else common[0]
    if state.rank == 0:
        _warn_if_not_newest(folder, chosen, newest, partial)
    return chosen


def _usable(folder: Path, partial: bool) -> list[str]:
    """Return the names of checkpoints that this rank can load: `newest` first, then by age."""
    newest = files.read_newest(folder)
    if not partial:
        full = newest is not None and not newest.endswith(files.PARTIAL) and (folder / newest).is_file()
        return [newest] if newest is not None and full else []
    names = frozenset(_own_names()) if state.initialized else None
    partials = [name for name, _ in files.complete_partials(folder, names)]
    return sorted(partials, key=lambda name: name != newest)


def _own_names() -> list[str]:
    suffix = "{}_{}.pt".format(*_part(state.rank))
    return [f"model_{suffix}", f"optimizer_{suffix}", _USER_CONTENT]


def _load_partial(folder: Path, model: _Model, optimizer: _Optimizer | None, strict: bool) -> Any:
    index = files.read_index(folder)
    model_name, optimizer_name, _ = _own_names()
    now = {"pipeline": state.pp_size, "tensor": state.tp_size}
    if dict(index.degrees) != now:
        raise CheckpointError(
            f"{folder.name} was saved with degrees {dict(index.degrees)}, and this job has {now}",
            hint="resume with the same degrees, or from a full checkpoint (partial=False)",
        )
    if problem := files.damage(folder, index, frozenset(_own_names())):
        raise CheckpointError(problem)
    # Read the optimizer before the model is changed. Its state keeps the tensors it is given, so it is not mapped: the
    # file may be pruned, by another host even, while training goes on.
    wanted = optimizer is not None and optimizer_name in index.files
    optimizer_state = read_file(folder / optimizer_name, "cpu") if wanted else None
    content = read_file(folder / _USER_CONTENT, "cpu") if _USER_CONTENT in index.files else None
    _load_model(model, read_file(folder / model_name, "cpu", mmap=True), strict)
    model.load_random_state(index.random)
    if optimizer is not None and optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    elif optimizer is not None and state.rank == 0:
        warnings.warn(f"{folder} holds no optimizer state: the optimizer starts anew", stacklevel=5)
    return {} if content is None else content


def _load_full(
    folder: Path,
    name: str,
    model: _Model,
    strict: bool,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> Any:
    if not (folder / name).is_file():
        partial = (folder / f"{name}{files.PARTIAL}").is_dir()
        raise CheckpointError(
            f"there is no file {folder / name}",
            hint=f"`{name}{files.PARTIAL}` is there: use partial=True" if partial else None,
        )
    content = folder / f"user_content_{name}"
    # An empty file is a mere marker (Hugging Face makes one), not a pickle.
    user_content = read_file(content, "cpu") if content.is_file() and content.stat().st_size else {}
    state_dict = read_file(folder / name, "cpu")
    _load_model(model, translate(state_dict) if translate else state_dict, strict)
    return user_content


def _load_model(model: _Model, state_dict: Any, strict: bool) -> None:
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"the file holds a {type(state_dict).__name__} instead of a state dict")
    try:
        model.load_state_dict(state_dict, strict=strict)
    except RuntimeError as error:  # torch lists what is missing, unexpected or of another shape
        raise CheckpointError(
            f"the checkpoint belongs to another model: {error}", hint="strict=False loads what fits"
        ) from error


# --- together ---------------------------------------------------------------------------------------------------------


def _the_model(model: _Model | None) -> _Model:
    found: Any = model if model is not None else state.model
    if found is None:
        raise UsageError("there is no model to save or load", hint="wrap it with smp.DistributedModel(...) first")
    return found  # type: ignore[no-any-return]


def _all_succeed(what: str, attempt: Callable[[], _T]) -> _T:
    """Let every rank try; return the own result, or raise CheckpointError on all of them, naming those that failed."""
    cause: Exception | None = None
    try:
        result = attempt()
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        cause = error
    errors = allgather(None if cause is None else _message(cause))
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        hint = cause.hint if isinstance(cause, SmpkitError) else None
        raise CheckpointError(f"{what}; {'; '.join(failed)}", hint=hint) from cause
    return result


def _message(error: Exception) -> str:
    return error.message if isinstance(error, SmpkitError) else f"{type(error).__name__}: {error}"
