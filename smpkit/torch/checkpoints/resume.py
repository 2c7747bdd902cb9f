"""`smp.resume_from_checkpoint`: load what was saved, on as many ranks as there are now.

Leaders (one rank per file system) look which checkpoints there are. The ranks of a file system divide the files of a
checkpoint among them and compare each once with its size and checksum; then each rank opens the files that it needs.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smpkit.errors import CheckpointError, escaped
from smpkit.plan.partition.assignment import Assignment
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.agreement import all_or_raise, together
from smpkit.torch.checkpoints.background import finish_previous_save
from smpkit.torch.checkpoints.entries import GROUPS, degrees, precision, shares_of, wrapped_model
from smpkit.torch.checkpoints.file_systems import FileSystems, file_systems_of
from smpkit.torch.checkpoints.load import load_loss_scale, load_model, load_optimizer
from smpkit.torch.checkpoints.objects import check_archive, read_file
from smpkit.torch.checkpoints.reader import CheckpointReader, StateReader
from smpkit.torch.checkpoints.save import USER_CONTENT, own_content_name
from smpkit.torch.core.announce import announce
from smpkit.torch.core.runtime import WrappedOptimizer, state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed.rendezvous import name_ranks
from smpkit.torch.model import DistributedModel
from smpkit.torch.placement.delayed import drop_deferred_loads
from smpkit.torch.state_dict import unmarked


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
        strict: names and tied weights must match exactly. False: what fits is loaded, and the log says what is not.
        load_optimizer: load the optimizer's state, too, if the checkpoint is partial, into the one that is wrapped.
        load_sharded_optimizer_state: with sharded data parallelism, False loads only the loss scale of the optimizer,
            as in SMP v1: moments and settings of groups start anew. Without sharded data parallelism it has no effect.
        translate_function: applied to the state dict of a full checkpoint before it is loaded.
        verify_checksums: False only compares the sizes of files, which saves reading them once before they are loaded.
        weights_only: False also loads objects of classes that `smp.load` refuses. Whoever can write to the folder can
            then run code in this job.

    Raises:
        CheckpointError: on all ranks, if there is no such checkpoint, it is damaged (without `tag`: all are), it has
            another format, it belongs to another model or another precision, or it lacks what a rank needs now.
        UsageError: there is no model.
    """
    states = load_sharded_optimizer_state or state.cfg.sharded_data_parallel_degree == 1
    finish_previous_save()  # which may be what is to be loaded
    model, folder = wrapped_model(), files.folder_at(path)
    if tag is not None:
        files.check_tag(tag)
    optimizer = state.optimizer if load_optimizer else None
    choice = _Choice(folder, partial, optimizer is not None, verify_checksums)
    name, missing = choice.newest() if tag is None else choice.tagged(tag)

    def load() -> Any:
        drop_deferred_loads()  # of an earlier call, which would overwrite this one's values in the first step
        if not partial:
            return _load_full(folder, name, model, strict, translate_function, weights_only)
        reader = CheckpointReader(folder / name, False, missing=missing, weights_only=weights_only)
        content = _load_partial(reader, model, optimizer, strict, states)
        if load_optimizer and optimizer is None and GROUPS in reader.objects:
            warn_user(
                f"`{name}` has an optimizer's states, but none is wrapped yet, and one that is wrapped later starts"
                " anew: wrap it before the resume, or pass load_optimizer=False"
            )
        return content

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
    folder = files.folder_at(path)
    survey = files.survey(folder, partial)
    for name, index in survey.usable.items():
        damage = None if index is None else files.find_damage(folder / name, index)
        if damage is None:
            if survey.damaged.keys() & {survey.newest, files.NEWEST}:
                _warn(folder, name, survey.damaged)
            return name
        survey.damaged[name] = damage
    if survey.damaged:
        raise _none_usable(folder, survey.damaged)
    return None


# --- choosing the checkpoint ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """Which checkpoint to load, with or without its files of the optimizer; all ranks ask for the same."""

    folder: Path
    partial: bool
    with_optimizer: bool
    verify_checksums: bool

    def tagged(self, tag: str) -> tuple[str, frozenset[str]]:
        """Return the name of the checkpoint with this tag, and what this host lacks of it."""
        name = f"{tag.removesuffix(files.PARTIAL)}{files.PARTIAL}" if self.partial else tag
        failure = f"checkpoint `{name}` in {self.folder} was not loaded"
        if self.partial:
            files.finish_saves(self.folder)
            _, saves = together(failure, lambda: files.read_index(self.folder / name).save_id, set)
            if len(saves) > 1:
                raise CheckpointError(f"{failure}; hosts have different saves of this name")
        damage, missing = self._check(name, file_systems_of(self.folder, failure), failure)
        if damage is not None:
            raise CheckpointError(
                f"{failure}; {damage}", hint="without a tag, the newest checkpoint that is intact is used"
            )
        return name, missing

    def newest(self) -> tuple[str, frozenset[str]]:
        """Return the name of the newest checkpoint that is intact on all ranks, and what this host lacks of it."""
        failure = "no checkpoint was loaded"
        file_systems = file_systems_of(self.folder, failure)
        _, (common, damaged, newest, lacking) = together(
            failure, lambda: self._saves() if file_systems.is_leader else None, _common_saves
        )
        if lacking:
            ranks = [rank for rank, leader in enumerate(file_systems.leaders) if leader in lacking]
            raise CheckpointError(
                f"there is no complete checkpoint in {self.folder} on {name_ranks(ranks)}, though there is one on "
                f"the others{_list(damaged)}",
                hint="resume on the hosts that saved, or keep checkpoints on a file system that all hosts share",
            )
        skipped = {name: text for name, text in damaged.items() if name in (newest, files.NEWEST)}
        is_of_kind = newest is not None and newest.endswith(files.PARTIAL) == self.partial
        if newest is not None and is_of_kind and newest not in (*common, *damaged):
            skipped[newest] = "not all ranks have it"
        for name in common:
            damage, missing = self._check(name, file_systems, failure)
            if damage is None:
                if skipped:
                    _warn(self.folder, name, skipped)
                elif state.rank == 0 and self.partial:
                    self._say_if_older(common[:2])
                return name, missing
            damaged[name] = skipped[name] = damage
        if damaged:
            raise _none_usable(self.folder, damaged)
        hint = "to start anew then, resume only if `smp.latest_checkpoint(folder)` is not None"
        raise CheckpointError(f"there is no complete checkpoint in {self.folder}", hint=hint)

    def _say_if_older(self, names: Sequence[str]) -> None:
        """Say that the first was saved before the second: somebody goes back, or a save was killed before `newest`."""
        with contextlib.suppress(CheckpointError):
            orders = [files.read_index(self.folder / name).order for name in names]
            if orders != sorted(orders, reverse=True):
                one, other = names
                announce([f"Resuming from `{one}`, which `{files.NEWEST}` names; `{other}` was saved later."])

    def _saves(self) -> _Saves:
        """Return the checkpoints of this file system, the newest first, with their saves; what is damaged; `newest`."""
        survey = files.survey(self.folder, self.partial)
        saves = {name: "" if index is None else index.save_id for name, index in survey.usable.items()}
        return saves, survey.damaged, survey.newest

    def _check(self, name: str, file_systems: FileSystems, failure: str) -> tuple[str | None, frozenset[str]]:
        """Return how a checkpoint is damaged on some rank, None if it is intact on all, and what this host lacks of it.

        The ranks of a file system divide its files among them. All raise CheckpointError if one of them cannot tell,
        such as for want of memory.
        """
        path = self.folder / name

        def look() -> tuple[str | None, list[str]]:
            try:
                if not self.partial:
                    if self.verify_checksums and file_systems.is_leader:
                        check_archive(path)
                    return None, []
                index = files.read_index(path)
                wanted = [
                    (name, entry["size"])
                    for name, entry in index.files.items()
                    if self.with_optimizer or not name.startswith("optimizer_")
                ]
                names = [name for name, rank in shares_of(wanted, file_systems.here).items() if rank == state.rank]
                damage, missing = files.look_at(path, index, names)
                if damage is None and self.verify_checksums:
                    here = sorted(set(names) - set(missing))
                    damage = files.find_corruption({path / name: index.files[name]["crc32"] for name in here})
                return damage, missing
            except CheckpointError as error:
                if files.is_fault_of_machine(error):
                    raise
                return error.message, []

        def decide(looks: list[tuple[str | None, list[str]]]) -> tuple[str | None, dict[int, frozenset[str]]]:
            damages = [f"rank {rank}: {damage}" for rank, (damage, _) in enumerate(looks) if damage]
            lacking: dict[int, frozenset[str]] = {}
            for leader, (_, missing) in zip(file_systems.leaders, looks, strict=True):
                lacking[leader] = lacking.get(leader, frozenset()).union(missing)
            if self.partial and not damages:
                index = files.read_index(path)
                texts = {leader: files.missing_text(path, index, missing) for leader, missing in lacking.items()}
                damages = [f"rank {leader}: {text}" for leader, text in texts.items() if text]
            return next(iter(damages), None), lacking

        _, (damage, lacking) = together(failure, look, decide)
        return damage, lacking[file_systems.leader]


_Saves = tuple[dict[str, str], dict[str, str], str | None]


def _common_saves(saves_by_rank: list[_Saves | None]) -> tuple[list[str], dict[str, str], str | None, list[int]]:
    """Return the checkpoints that all file systems have, the newest first; what is damaged; `newest`; who lacks all."""
    surveys = {rank: saves for rank, saves in enumerate(saves_by_rank) if saves is not None}  # of leaders
    lacking = [rank for rank, (saves, _, _) in surveys.items() if not saves]
    damaged = {name: text for _, texts, _ in reversed(surveys.values()) for name, text in texts.items()}
    # Hosts with folders of their own may have different checkpoints, or different saves under one name.
    first, _, newest = surveys[0]
    common = [name for name, save in first.items() if all(saves.get(name) == save for saves, _, _ in surveys.values())]
    for name in first:
        if name not in common and all(name in saves for saves, _, _ in surveys.values()):
            damaged[name] = "hosts with folders of their own have different saves of it: each save needs its own tag"
    return common, damaged, newest, lacking if len(lacking) < len(surveys) else []


def _none_usable(folder: Path, damaged: Mapping[str, str]) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint in {folder} can be used{_list(damaged)}",
        hint="bring back what is missing; to start anew, use another folder or move this one away",
    )


def _list(damaged: Mapping[str, str]) -> str:
    return escaped("".join(f"; `{name}`: {text}" for name, text in damaged.items()))


def _warn(folder: Path, chosen: str, damaged: Mapping[str, str]) -> None:
    warn_user(f"`{chosen}` in {folder} is used instead of what `{files.NEWEST}` names{_list(damaged)}")


# --- loading ----------------------------------------------------------------------------------------------------------


def _load_partial(
    reader: CheckpointReader, model: DistributedModel, optimizer: WrappedOptimizer | None, strict: bool, states: bool
) -> Any:
    index = reader.index
    if optimizer is not None and index.precision != precision():
        raise CheckpointError(
            f"the checkpoint is of {_trained_in(index.precision)}, but this job has {_trained_in(precision())}",
            hint="resume in the same precision, and with sharded data parallelism, whose parts are float32, if the job"
            " that saved had it; or start the optimizer anew with load_optimizer=False, which rounds the weights",
        )
    now = degrees()
    same = {kind for kind, degree in now.items() if index.degrees.get(kind) == degree}
    content = _content_of(reader, same_degrees=same == now.keys())
    load_model(model, reader, strict)
    if optimizer is not None and states:
        load_optimizer(optimizer, model, reader)
    elif optimizer is not None:
        load_loss_scale(optimizer, reader)
    model.load_random_state(index.random)
    # The automatic partition is the same as in the job that saved, if the degrees are (SMP v1's rule).
    if model.pipeline is not None and index.partition is not None and same >= {"pipeline", "virtual pipeline"}:
        model.pipeline.resumed = Assignment.from_json(index.partition)
    if same == now.keys():
        model.activations.load(index.activations)
    return {} if content is None else content


def _content_of(reader: CheckpointReader, *, same_degrees: bool) -> Any:
    """Return this rank's own content, if there is one for these degrees, or that of rank 0; None if there is none."""
    names = [name for name in reader.index.files if name.startswith(USER_CONTENT)]
    own = [name for name in names if "of" in name]
    fits = same_degrees and all(name.endswith(f"of{state.size}.pt") for name in own)
    if own and not fits:
        warn_user(
            "the ranks that saved had different user content: with other degrees, or another number of ranks, all get"
            " that of rank 0"
        )
    wanted = [own_content_name()] if fits and own_content_name() in own else [name for name in names if name not in own]
    here = [reader.folder / name for name in wanted if (reader.folder / name).is_file()]
    return read_file(here[0], "cpu", weights_only=reader.weights_only) if here else None


def _trained_in(precision: str) -> str:
    return "float32 weights" if precision == "float32" else f"{precision} weights with float32 masters"


def _load_full(
    folder: Path,
    name: str,
    model: DistributedModel,
    strict: bool,
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None,
    weights_only: bool | None,
) -> Any:
    path, content = folder / name, folder / f"{USER_CONTENT}_{name}"
    if not path.is_file():
        partial = (folder / f"{name}{files.PARTIAL}").is_dir()
        raise CheckpointError(
            f"there is no file {path}",
            hint=f"`{name}{files.PARTIAL}` is there: use partial=True" if partial else None,
        )
    # Hugging Face makes an empty file as a marker, which is no pickle.
    is_content = content.is_file() and content.stat().st_size > 0
    user_content = read_file(content, "cpu", weights_only=weights_only) if is_content else {}
    # Mapped, not read; files from before 2020 are no zip files and cannot be mapped.
    saved = read_file(path, "cpu", weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"the file holds a {type(saved).__name__} instead of a state dict")
    saved = translate(dict(saved)) if translate else saved
    load_model(model, StateReader(path, unmarked(saved)), strict, prefix="")
    return user_content
