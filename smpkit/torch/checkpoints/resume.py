"""`smp.resume_from_checkpoint`: load what was saved, on as many ranks as there are now."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smpkit.errors import CheckpointError
from smpkit.plan.partition.assignment import Assignment
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.load import load_loss_scale, load_model, load_optimizer
from smpkit.torch.checkpoints.reader import CheckpointReader, StateReader
from smpkit.torch.checkpoints.save import USER_CONTENT
from smpkit.torch.checkpoints.save_load import read_file, read_mapped
from smpkit.torch.checkpoints.state_entries import Model, Optimizer, all_or_raise, wrapped_model
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.distributed.rendezvous import name_ranks
from smpkit.torch.placement.delayed import drop_deferred_loads
from smpkit.torch.state_dict import PARTIAL_KEY

__all__ = ["latest_checkpoint", "resume_from_checkpoint"]


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

    The job may have other degrees and another number of ranks than the one that saved: every rank reads the parts that
    it holds now. What a rank of a pipeline holds is known in the first step, so parameters without memory
    (`smp.delay_param_initialization`) and the optimizer's states are read then, from the same files.

    Args:
        path: the folder that was given to `save_checkpoint`.
        tag: the newest one if not given.
        partial: True: a partial checkpoint. False: one file, `path/tag`, which may be a plain `torch.save` of a state
            dict.
        strict: names must match exactly.
        load_optimizer: load the optimizer's state, too, if the checkpoint is partial.
        load_sharded_optimizer_state: with sharded data parallelism, False loads only the loss scale of the optimizer,
            as in SMP v1: moments and settings of groups start anew. Without sharded data parallelism it has no effect.
        translate_function: applied to the state dict of a full checkpoint before it is loaded.

    Raises:
        CheckpointError: on all ranks, if there is no such checkpoint, it is damaged, it belongs to another model, or it
            lacks what a rank needs now.
        UsageError: there is no model.
    """
    states = load_sharded_optimizer_state or state.cfg.sharded_data_parallel_degree == 1
    model, folder = wrapped_model(), Path(path)
    name = _choose(folder, tag, partial)
    optimizer = state.optimizer if load_optimizer else None

    def load() -> Any:
        drop_deferred_loads()  # of an earlier call, which would overwrite this one's values in the first step
        if partial:
            return _load_partial(folder / name, model, optimizer, strict, states)
        return _load_full(folder, name, model, strict, translate_function)

    return all_or_raise(f"checkpoint `{name}` in {folder} was not loaded", load)


def latest_checkpoint(path: str | os.PathLike[str], partial: bool = True) -> str | None:
    """Return the name of the newest complete checkpoint in a folder, or None; for "resume if there is something".

    ::

        if smp.latest_checkpoint(path) is not None:
            content = smp.resume_from_checkpoint(path)

    Local: ranks with different folders may get different answers. When `newest` names an incomplete checkpoint, the
    newest complete one is returned, with a warning. `partial` as in `resume_from_checkpoint`.
    """
    folder = Path(path)
    names, newest = list(_usable(folder, partial)), files.read_newest(folder)
    if not names:
        return None
    _warn_if_not_newest(folder, names[0], newest, partial)
    return names[0]


# --- choosing the checkpoint ------------------------------------------------------------------------------------------


def _choose(folder: Path, tag: str | None, partial: bool) -> str:
    """Return the name of the folder or file to load: the same on all ranks."""
    if tag is not None:
        return f"{tag.removesuffix(files.PARTIAL)}{files.PARTIAL}" if partial else tag
    seen = allgather((_usable(folder, partial), files.read_newest(folder)))
    # Hosts with folders of their own may have different checkpoints, or different saves under one name.
    common = [name for name, save in seen[0][0].items() if all(theirs.get(name) == save for theirs, _ in seen)]
    newest = seen[0][1]
    lacking = [rank for rank, (theirs, _) in enumerate(seen) if not theirs]
    if 0 < len(lacking) < len(seen):
        raise CheckpointError(
            f"there is no complete checkpoint in {folder} on {name_ranks(lacking)}, though there is one on the others",
            hint="resume on the hosts that saved, or keep checkpoints on a file system that all hosts share",
        )
    if not common:
        raise CheckpointError(f"there is no complete checkpoint in {folder}", hint="ask smp.latest_checkpoint")
    chosen: str = newest if newest in common else common[0]
    if state.rank == 0:
        _warn_if_not_newest(folder, chosen, newest, partial)
    return chosen


def _usable(folder: Path, partial: bool) -> dict[str, str]:
    """Return the names of complete checkpoints with their save ids: `newest` first, then by age."""
    newest = files.read_newest(folder)
    if not partial:
        full = newest is not None and not newest.endswith(files.PARTIAL) and (folder / newest).is_file()
        return {newest: ""} if newest is not None and full else {}
    found = [(name, index.save_id) for name, index in files.complete_partials(folder)]
    return dict(sorted(found, key=lambda item: item[0] != newest))


def _warn_if_not_newest(folder: Path, chosen: str, newest: str | None, partial: bool) -> None:
    if newest is not None and newest != chosen and newest.endswith(files.PARTIAL) == partial:
        text = f"{folder / files.NEWEST} names `{newest}`, which is missing or incomplete: `{chosen}` is used"
        warnings.warn(text, UserWarning, stacklevel=4)


# --- loading ----------------------------------------------------------------------------------------------------------


def _load_partial(folder: Path, model: Model, optimizer: Optimizer | None, strict: bool, states: bool) -> Any:
    index = files.read_index(folder)
    if problem := files.find_damage(folder, index):
        raise CheckpointError(problem)
    reader = CheckpointReader(folder)
    content = read_file(folder / USER_CONTENT, "cpu") if USER_CONTENT in index.files else None
    load_model(model, reader, strict)
    if optimizer is not None and states:
        load_optimizer(optimizer, model, reader)
    elif optimizer is not None:
        load_loss_scale(optimizer, reader)
    model.load_random_state(index.random)
    _resume_partition(model, index)
    return {} if content is None else content


def _resume_partition(model: Model, index: files.Index) -> None:
    """Make the automatic partition the same as in the job that saved, if the degrees are the same (SMP v1's rule)."""
    if model.pipeline is None or index.partition is None:
        return
    now = {"pipeline": state.pp_size, "virtual pipeline": state.cfg.virtual_pipeline_degree}
    if all(index.degrees.get(kind) == degree for kind, degree in now.items()):
        model.pipeline.resumed = Assignment.from_json(index.partition)


def _load_full(
    folder: Path,
    name: str,
    model: Model,
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
    # Hugging Face makes an empty file as a marker, which is no pickle.
    user_content = read_file(content, "cpu") if content.is_file() and content.stat().st_size else {}
    load_model(model, StateReader(folder / name, _state_of(folder / name, translate)), strict, prefix="")
    return user_content


def _state_of(path: Path, translate: Callable[[dict[str, Any]], dict[str, Any]] | None) -> Mapping[str, Any]:
    """Return the state dict of a file, mapped instead of read if the file's format allows it."""
    saved = read_mapped(path)
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"the file holds a {type(saved).__name__} instead of a state dict")
    saved = translate(dict(saved)) if translate else saved
    return {name: value for name, value in saved.items() if name != PARTIAL_KEY}
