"""`smp.resume_from_checkpoint`: load what was saved, on as many ranks as there are now."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smpkit.errors import CheckpointError, escaped
from smpkit.plan.partition.assignment import Assignment
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.background import finish_previous_save
from smpkit.torch.checkpoints.file_systems import position_beside
from smpkit.torch.checkpoints.integrity import Member, find_corruption, members_of, share_of
from smpkit.torch.checkpoints.load import load_loss_scale, load_model, load_optimizer
from smpkit.torch.checkpoints.reader import CheckpointReader, StateReader, members_in, present_files
from smpkit.torch.checkpoints.save_load import read_file, read_mapped
from smpkit.torch.checkpoints.state_entries import all_or_raise, degrees, wrapped_model
from smpkit.torch.core.runtime import WrappedOptimizer, state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.distributed.rendezvous import name_ranks
from smpkit.torch.model import DistributedModel
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
    verify_checksums: bool = True,
    weights_only: bool | None = None,
) -> Any:
    """Load a checkpoint into the wrapped model and optimizer; called by all ranks. Return the user content, or `{}`.

    The job may have other degrees and another number of ranks than the one that saved: every rank reads the parts that
    it holds now. What a rank of a pipeline holds is known in the first step, so parameters without memory
    (`smp.delay_param_initialization`) and the optimizer's states are read then, from the same files.

    Before anything is loaded, the ranks of a file system read all files that they need once, in threads, and compare
    them with their checksums. Without `tag`, all ranks use the newest checkpoint that is intact on all of them, and
    warn which newer one is damaged, and how.

    Args:
        path: the folder that was given to `save_checkpoint`.
        tag: the newest intact one if not given.
        partial: True: a partial checkpoint. False: one file, `path/tag`, which may be a plain `torch.save` of a state
            dict.
        strict: names must match exactly.
        load_optimizer: load the optimizer's state, too, if the checkpoint is partial.
        load_sharded_optimizer_state: with sharded data parallelism, False loads only the loss scale of the optimizer,
            as in SMP v1: moments and settings of groups start anew. Without sharded data parallelism it has no effect.
        translate_function: applied to the state dict of a full checkpoint before it is loaded.
        verify_checksums: False only compares the sizes of files, which saves reading them once before they are loaded.
        weights_only: False also loads objects of classes that `smp.load` refuses. Whoever can write to the folder can
            then run code in this job.

    Raises:
        CheckpointError: on all ranks, if there is no such checkpoint, it is damaged (without `tag`: all are), it has
            another format, it belongs to another model, or it lacks what a rank needs now.
        UsageError: there is no model.
    """
    states = load_sharded_optimizer_state or state.cfg.sharded_data_parallel_degree == 1
    finish_previous_save()  # which may be what is to be loaded
    model, folder = wrapped_model(), Path(path)
    optimizer = state.optimizer if load_optimizer else None
    wanted = _Wanted(folder, partial, optimizer is not None, verify_checksums)
    name = wanted.newest() if tag is None else wanted.tagged(tag)

    def load() -> Any:
        drop_deferred_loads()  # of an earlier call, which would overwrite this one's values in the first step
        if partial:
            return _load_partial(files.folder_of(folder, name), model, optimizer, strict, states, weights_only)
        return _load_full(folder, name, model, strict, translate_function, weights_only)

    return all_or_raise(f"checkpoint `{name}` in {folder} was not loaded", load)


def latest_checkpoint(path: str | os.PathLike[str], partial: bool = True) -> str | None:
    """Return the name of the newest complete checkpoint in a folder, or None; for "resume if there is something".

    ::

        if smp.latest_checkpoint(path) is not None:
            content = smp.resume_from_checkpoint(path)

    Local: ranks with different folders may get different answers. Quick: names and sizes are compared, checksums are
    not. When `newest` names a damaged checkpoint, the newest complete one is returned, with a warning. `partial` as in
    `resume_from_checkpoint`.

    Raises:
        CheckpointError: there are checkpoints, and none is complete, or the newest one has another format: to start
            anew would replace them.
    """
    folder = Path(path)
    found = files.survey(folder, partial)
    if found.usable:
        name = next(iter(found.usable))
        if found.damaged.keys() & {found.newest, files.NEWEST}:
            _warn(folder, name, found.damaged)
        return name
    if found.damaged:
        raise _none_usable(folder, found.damaged)
    return None


# --- choosing the checkpoint ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """Which checkpoint to load; all ranks ask for the same.

    Args:
        with_optimizer: whether the optimizer's files are read.
    """

    folder: Path
    partial: bool
    with_optimizer: bool
    verify_checksums: bool

    def tagged(self, tag: str) -> str:
        """Return the name of the checkpoint with this tag; raise CheckpointError if it is damaged."""
        name = f"{tag.removesuffix(files.PARTIAL)}{files.PARTIAL}" if self.partial else tag
        failure = f"checkpoint `{name}` in {self.folder} was not loaded"
        if self.partial:
            all_or_raise(failure, lambda: files.read_index(files.folder_of(self.folder, name)))
        if damage := self._find_damage(name, failure):
            raise CheckpointError(
                f"{failure}; {damage}",
                hint="without a tag, the newest checkpoint that is intact is used",
            )
        return name

    def newest(self) -> str:
        """Return the name of the newest checkpoint that is intact on all ranks."""
        failure = "no checkpoint was loaded"
        found = all_or_raise(failure, lambda: files.survey(self.folder, self.partial))
        saves = {name: "" if index is None else index.save_id for name, index in found.usable.items()}
        seen = allgather((saves, dict(found.damaged), found.newest))
        damaged = {name: text for _, theirs, _ in reversed(seen) for name, text in theirs.items()}
        lacking = [rank for rank, (usable, _, _) in enumerate(seen) if not usable]
        if 0 < len(lacking) < len(seen):
            raise CheckpointError(
                f"there is no complete checkpoint in {self.folder} on {name_ranks(lacking)}, though there is one on "
                f"the others{_list(damaged)}",
                hint="resume on the hosts that saved, or keep checkpoints on a file system that all hosts share",
            )
        # Hosts with folders of their own may have different checkpoints, or different saves under one name.
        common = [name for name, save in seen[0][0].items() if all(usable.get(name) == save for usable, _, _ in seen)]
        chosen: str
        for chosen in common:
            damage = self._find_damage(chosen, failure)
            if damage is None:
                self._warn_if_not_newest(chosen, seen[0][2], damaged)
                return chosen
            damaged[chosen] = damage
        if damaged:
            raise _none_usable(self.folder, damaged)
        raise CheckpointError(
            f"there is no complete checkpoint in {self.folder}" + (" that all ranks have" if seen[0][0] else ""),
            hint="ask smp.latest_checkpoint",
        )

    def _warn_if_not_newest(self, chosen: str, newest: str | None, damaged: Mapping[str, str]) -> None:
        passed = {name: text for name, text in damaged.items() if name in (newest, files.NEWEST)}
        of_this_kind = newest is not None and newest.endswith(files.PARTIAL) == self.partial
        if of_this_kind and newest != chosen and not passed:
            passed = {str(newest): "not all ranks have it"}
        if passed:
            _warn(self.folder, chosen, passed)

    def _find_damage(self, name: str, failure: str) -> str | None:
        """Return how a checkpoint is damaged on some rank; None if it is intact on all. All ranks call this.

        The ranks of a file system divide its files among them.

        Raises:
            CheckpointError: on all ranks, if one of them cannot tell, such as for want of memory.
        """
        path = files.folder_of(self.folder, name) if self.partial else self.folder / name
        known = path / files.INDEX if self.partial else path
        position, count = position_beside(known)
        found = all_or_raise(failure, lambda: _damage_of(lambda: self._look(path, position, count)))
        return next((f"rank {rank}: {damage}" for rank, damage in enumerate(allgather(found)) if damage), None)

    def _look(self, path: Path, position: int, count: int) -> str | None:
        """Look for damage in this rank's share of a checkpoint; it is one of `count` with the same file system."""
        if not self.partial:
            members = members_of(path) if path.is_file() and zipfile.is_zipfile(path) else []
            return self._corruption(members, position, count)
        index = files.read_index(path)
        if damage := files.find_damage(path, index):
            return damage
        present = present_files(path, index)
        names = sorted(name for name in present if self.with_optimizer or not name.startswith("optimizer_"))
        if corruption := self._corruption(members_in(path, index, names), position, count):
            return corruption
        # These raise if a file makes no sense: not all damage is in what has a checksum.
        _ = CheckpointReader(path, verify_checksums=False).metadata
        for name in names[position::count]:
            if name.endswith(".pt"):
                read_mapped(path / name, weights_only=True, quiet=True)
        return None

    def _corruption(self, members: Sequence[Member], position: int, count: int) -> str | None:
        mine = share_of(members, position, count) if self.verify_checksums else []
        return find_corruption(mine)


def _damage_of(look: Callable[[], str | None]) -> str | None:
    try:
        return look()
    except CheckpointError as error:
        if files.is_fault_of_machine(error):
            raise
        return error.message


def _none_usable(folder: Path, damaged: Mapping[str, str]) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint in {folder} can be used{_list(damaged)}",
        hint="bring back what is missing; to start anew, use another folder or move this one away",
    )


def _list(damaged: Mapping[str, str]) -> str:
    return escaped("".join(f"; `{name}`: {text}" for name, text in damaged.items()))


def _warn(folder: Path, chosen: str, damaged: Mapping[str, str]) -> None:
    text = f"`{chosen}` in {folder} is used instead of what `{files.NEWEST}` names{_list(damaged)}"
    warn_user(text)


# --- loading ----------------------------------------------------------------------------------------------------------


def _load_partial(
    folder: Path,
    model: DistributedModel,
    optimizer: WrappedOptimizer | None,
    strict: bool,
    states: bool,
    weights_only: bool | None,
) -> Any:
    index = files.read_index(folder)
    reader = CheckpointReader(folder, verify_checksums=False, weights_only=weights_only)  # they have been verified
    content = None
    if found := [name for name in present_files(folder, index) if name.startswith("user_content.")]:
        content = read_file(folder / found[0], "cpu", weights_only=weights_only)
    load_model(model, reader, strict)
    if optimizer is not None and states:
        load_optimizer(optimizer, model, reader)
    elif optimizer is not None:
        load_loss_scale(optimizer, reader)
    model.load_random_state(index.random)
    _resume_partition(model, index)
    if all(index.degrees.get(kind) == degree for kind, degree in degrees().items()):
        model.activations.load(index.activations)
    return {} if content is None else content


def _resume_partition(model: DistributedModel, index: files.Index) -> None:
    """Make the automatic partition the same as in the job that saved, if the degrees are the same (SMP v1's rule)."""
    if model.pipeline is None or index.partition is None:
        return
    now = {"pipeline": state.pp_size, "virtual pipeline": state.cfg.virtual_pipeline_degree}
    if all(index.degrees.get(kind) == degree for kind, degree in now.items()):
        model.pipeline.resumed = Assignment.from_json(index.partition)


def _load_full(
    folder: Path,
    name: str,
    model: DistributedModel,
    strict: bool,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None,
    weights_only: bool | None,
) -> Any:
    if not (folder / name).is_file():
        partial = (folder / f"{name}{files.PARTIAL}").is_dir()
        raise CheckpointError(
            f"there is no file {folder / name}",
            hint=f"`{name}{files.PARTIAL}` is there: use partial=True" if partial else None,
        )
    content = folder / f"user_content_{name}"
    # Hugging Face makes an empty file as a marker, which is no pickle.
    is_content = content.is_file() and content.stat().st_size > 0
    user_content = read_file(content, "cpu", weights_only=weights_only) if is_content else {}
    saved = _state_of(folder / name, translate, weights_only)
    load_model(model, StateReader(folder / name, saved), strict, prefix="")
    return user_content


def _state_of(
    path: Path, translate: Callable[[dict[str, Any]], dict[str, Any]] | None, weights_only: bool | None
) -> Mapping[str, Any]:
    """Return the state dict of a file, mapped instead of read if the file's format allows it."""
    saved = read_mapped(path, weights_only=weights_only)
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"the file holds a {type(saved).__name__} instead of a state dict")
    saved = translate(dict(saved)) if translate else saved
    return {name: value for name, value in saved.items() if name != PARTIAL_KEY}
