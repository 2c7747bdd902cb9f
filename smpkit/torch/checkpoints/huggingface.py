"""Save and load folders like Hugging Face's `save_pretrained`: `config.json`, safetensors files and their index.

A safetensors file has a JSON header that says where each tensor is, then the tensors. So ranks write one together like
any file of whole tensors (`full_state.py`), and each rank reads only the slices that it needs (`load.py`).
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from smpkit.errors import CheckpointError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.file_systems import FileSystems, find_file_systems, position_beside
from smpkit.torch.checkpoints.full_state import FileSlot, FullState, full_state_of, write_slots
from smpkit.torch.checkpoints.integrity import find_corruption, share_of
from smpkit.torch.checkpoints.load import load_model
from smpkit.torch.checkpoints.reader import PieceReader, metadata_of
from smpkit.torch.checkpoints.safetensors import (
    add_checksums,
    dtype_of,
    header_of,
    map_tensors,
    members_of,
    specs_of,
)
from smpkit.torch.checkpoints.state_entries import all_or_raise, model_entries, wrapped_model
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.model import DistributedModel
from smpkit.torch.placement.delayed import run_deferred_loads
from smpkit.torch.tensor_parallel.replace import applied_rule_of
from smpkit.torch.tensor_parallel.state_dict import replaced_modules

__all__ = ["load_pretrained", "save_pretrained"]

INDEX: Final = "model.safetensors.index.json"
_WEIGHT_FILES: Final = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|pytorch_model.*\.bin.*"
)
_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_pretrained(
    folder: str | os.PathLike[str], model: DistributedModel | None = None, max_shard_size: int | str = "5GB"
) -> None:
    """Write the whole model to a folder that `AutoModel.from_pretrained` loads; called by all ranks.

    Every rank writes what it holds directly to its place, so none needs memory for more than one whole tensor. Modules
    that tensor parallelism has replaced are translated back. The folder appears complete; an old one is replaced, and
    other files in it (a tokenizer's) are kept. For a model without a `config` only safetensors files are written.

    Args:
        model: the wrapped model; the last one that was wrapped if not given.
        max_shard_size: bytes of tensors in one file, as a number or as "5GB".

    Raises:
        CheckpointError: on all ranks, if one cannot write its part; it names the rank.
        UsageError: there is no model, or `max_shard_size` is no size.
    """
    # A rename would replace a link (a job's SM_MODEL_DIR, say) instead of the folder that it leads to.
    model, target, limit = wrapped_model(model), Path(folder).resolve(), _bytes_of(max_shard_size)
    failure = f"the model was not saved to {target}"
    save_id: str = allgather(files.new_save_id())[0]
    file_systems = find_file_systems(target.parent, save_id, failure)
    staged = files.staging_folder(target.parent, target.name, save_id)
    try:
        all_or_raise(failure, run_deferred_loads)
        full_state = all_or_raise(failure, lambda: _without_tied_names(model, full_state_of(model, translate=True)))
        slots = all_or_raise(failure, lambda: _plan_files(staged, target, model, full_state, limit, file_systems))
        entries = all_or_raise(failure, lambda: model_entries(model))
        write_slots(slots, full_state, entries, file_systems, failure)
        all_or_raise(failure, lambda: _add_checksums(staged) if file_systems.is_leader else None)
        all_or_raise(failure, lambda: _publish(staged, target, file_systems))
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def load_pretrained(
    folder: str | os.PathLike[str],
    model: DistributedModel | None = None,
    strict: bool = True,
    verify_checksums: bool = True,
) -> None:
    """Load the weights of a Hugging Face folder (safetensors) into the wrapped model; called by all ranks.

    Every rank reads the slices that it holds. With a pipeline, parameters without memory
    (`smp.delay_param_initialization`) are read in the first step, so no rank ever holds the whole model.

    Args:
        model: the wrapped model; the last one that was wrapped if not given.
        strict: raise if names differ, apart from those that the model's class ignores.
        verify_checksums: compare the files that `smp.save_pretrained` wrote with their checksums, which reads them once
            before they are loaded. Files of other programs carry none.

    Raises:
        CheckpointError: on all ranks, if there are no safetensors, they are damaged, or they belong to another model.
        UsageError: there is no model.
    """
    wrapped, path = wrapped_model(model), Path(folder)
    failure = f"{path} was not loaded"
    reader = _FolderReader(path, _NameMapping(wrapped.module))
    if verify_checksums:
        position, count = position_beside(path)
        all_or_raise(failure, lambda: reader.verify(position, count))
    all_or_raise(failure, lambda: load_model(wrapped, reader, strict, prefix=""))


# --- writing ----------------------------------------------------------------------------------------------------------


def _bytes_of(size: object) -> int:
    """Return a size, such as "5GB", in bytes."""
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", size.strip(), re.IGNORECASE)
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    raise UsageError(f"max_shard_size is {size!r}", hint='use a number of bytes, or a size such as "5GB" or "200MB"')


def _without_tied_names(model: DistributedModel, full_state: FullState) -> FullState:
    """Leave out all but one name of tied weights, which `from_pretrained` ties again."""
    own = model.module.state_dict(keep_vars=True)
    dropped, seen = set(_tied_names(model.module)) & full_state.tensors.keys(), set()
    for name in full_state.tensors:
        if name in own and name not in full_state.translated and name not in dropped:
            if id(own[name]) in seen:
                dropped.add(name)
            seen.add(id(own[name]))
    return FullState(
        {name: each for name, each in full_state.tensors.items() if name not in dropped}, full_state.modules
    )


def _tied_names(root: nn.Module) -> Mapping[str, str]:
    """Return the names that a Hugging Face model ties to others, if its configuration enables that."""
    config = getattr(root, "config", None)
    tied = getattr(_original_class(root), "_tied_weights_keys", None)
    if not getattr(config, "tie_word_embeddings", False) or not isinstance(tied, Mapping):
        return {}
    return tied


def _plan_files(
    staged: Path, target: Path, model: DistributedModel, full_state: FullState, limit: int, file_systems: FileSystems
) -> dict[str, FileSlot]:
    """Decide where each tensor goes, equally on all ranks; leaders make the files with room for the tensors."""
    parts = list(_split_by_size(full_state, limit))
    count = len(parts)
    numbered = [f"model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]
    names = numbered if count > 1 else ["model.safetensors"]
    slots: dict[str, FileSlot] = {}
    headers = {}
    for name, part in zip(names, parts, strict=True):
        headers[name], places = header_of(part)
        slots |= {key: FileSlot(staged / name, offset, *part[key]) for key, offset in places.items()}
    if file_systems.is_leader:
        with files.as_checkpoint_error(f"{target} cannot be written"):
            files.remove_leftovers(target.parent, staged.name.rsplit(".", 2)[1])
            staged.mkdir()
            for name, header in headers.items():
                files.fsync_write(staged / name, lambda file, header=header: file.write(header))  # type: ignore[misc]
            if count > 1:
                _write_index(staged, full_state, slots)
            _write_config(staged, model.module, full_state)
    return slots


def _split_by_size(full_state: FullState, limit: int) -> Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Yield the tensors of each file; none is larger than `limit`, unless it has a single tensor."""
    part: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    used = 0
    for name, (shape, dtype) in full_state.tensors.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if part and used + size > limit:
            yield part
            part, used = {}, 0
        part[name] = shape, dtype
        used += size
    yield part


def _add_checksums(staged: Path) -> None:
    with files.as_checkpoint_error(f"{staged} cannot be written"):
        for path in sorted(staged.glob("*.safetensors")):
            add_checksums(path)


def _write_index(staged: Path, full_state: FullState, slots: Mapping[str, FileSlot]) -> None:
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in full_state.tensors.values())
    weight_map = {name: slot.path.name for name, slot in slots.items()}
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2)
    files.fsync_write(staged / INDEX, lambda file: file.write(text.encode()))


def _write_config(staged: Path, root: nn.Module, full_state: FullState) -> None:
    """Write the configuration of a Hugging Face model, as `save_pretrained` would."""
    known: Any = getattr(root, "config", None)
    if known is None or not hasattr(known, "save_pretrained"):
        return
    config: Any = copy.deepcopy(known)
    config.architectures = [_original_class(root).__name__]
    dtypes = {dtype for _, dtype in full_state.tensors.values() if dtype.is_floating_point}
    if len(dtypes) == 1:
        config.dtype = str(dtypes.pop()).removeprefix("torch.")
    config.save_pretrained(staged)
    generation: Any = getattr(root, "generation_config", None)
    if generation is not None and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(staged)


def _original_class(root: nn.Module) -> type[nn.Module]:
    """Return the script's own class of a model; tensor parallelism may have replaced the whole model."""
    entry = applied_rule_of(root)
    return type(root) if entry is None else entry.original_class


def _publish(staged: Path, target: Path, file_systems: FileSystems) -> None:
    if not file_systems.is_leader or not staged.exists():
        return
    with files.as_checkpoint_error(f"{target} cannot be written"):
        others = target.iterdir() if target.is_dir() else ()
        for other in others:  # keep what is not ours, such as a tokenizer
            if _WEIGHT_FILES.fullmatch(other.name) or (staged / other.name).exists():
                continue
            if other.is_dir():
                shutil.copytree(other, staged / other.name)
            else:
                shutil.copy2(other, staged / other.name)
        files.sync_folder(staged)
        files.publish_folder(staged, target)


# --- reading ----------------------------------------------------------------------------------------------------------


class _FolderReader(PieceReader):
    """Reads the safetensors files of a folder.

    Args:
        rename: maps the names in the files to those to use; entries that it leaves out are ignored.
    """

    def __init__(self, folder: Path, rename: Callable[[list[str]], Mapping[str, str]]) -> None:
        super().__init__(folder)
        self._rename = rename

    def verify(self, position: int, count: int) -> None:
        """Compare files with their checksums; this rank is one of `count` that divide them.

        Raises:
            CheckpointError: one of this rank's is damaged.
        """
        members = [member for name in self._files() for member in members_of(self.folder / name)]
        if corruption := find_corruption(share_of(members, position, count)):
            raise CheckpointError(corruption)

    def _describe(self) -> Metadata:
        specs = {name: specs_of(self.folder / name) for name in self._files()}
        found_in = {key: (file, each) for file, tensors in specs.items() for key, each in tensors.items()}
        spec = {}
        for key, name in self._rename(list(found_in)).items():
            file, each = found_in[key]
            shape = [int(size) for size in each["shape"]]
            zeros = [0] * len(shape)
            dtype = str(dtype_of(each)).removeprefix("torch.")
            spec[name] = {"dtype": dtype, "shape": shape, "pieces": [[file, [key], zeros, shape, zeros]]}
        return metadata_of(spec, dict.fromkeys(specs))  # each header has been compared with its file

    def _files(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            try:
                names = set(json.loads((self.folder / INDEX).read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{self.folder / INDEX} cannot be read: {error!r}") from error
            if any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise CheckpointError(f"{self.folder / INDEX} names files outside of its folder")
            return sorted(names)
        if (self.folder / "model.safetensors").is_file():
            return ["model.safetensors"]
        raise CheckpointError(
            f"{self.folder} holds no model.safetensors and no {INDEX}",
            hint="load a folder with pytorch_model.bin with transformers, and save it again",
        )

    def _open(self, path: Path) -> dict[str, torch.Tensor]:
        return map_tensors(path)


class _NameMapping:
    """Maps the names in a folder to those of a model, by the rules of `from_pretrained`.

    Weights of the bare model can be loaded into a model with a head, and the reverse: the name of the bare model
    (`transformer.`) is prepended or removed. Names that the class ignores are left out.
    """

    def __init__(self, root: nn.Module) -> None:
        kind = _original_class(root)
        prefix = getattr(kind, "base_model_prefix", "")
        self._prefix = f"{prefix}." if prefix else ""
        self._has_head = bool(prefix) and prefix in dict(root.named_children())
        self._own = root.state_dict(keep_vars=True).keys()
        # Names inside a replaced module are never ignored: only its translation knows which of them it needs.
        self._translated = tuple(f"{name}." if name else "" for name, _, _ in replaced_modules(root))
        self._ignored = [re.compile(each) for each in getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def __call__(self, names: list[str]) -> dict[str, str]:
        """Return the model's names by those in the folder."""
        renamed = self._renamed(names)
        return {name: ours for name, ours in renamed.items() if ours in self._own or not self._is_ignored(ours)}

    def _renamed(self, names: list[str]) -> dict[str, str]:
        bare = self._prefix and not any(name.startswith(self._prefix) for name in names)
        if self._has_head and bare:
            return {name: self._prefix + name for name in names}
        if self._prefix and not self._has_head and not bare:
            # This model has no head: leave out the head's weights.
            return {name: name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)}
        return {name: name for name in names}

    def _is_ignored(self, name: str) -> bool:
        return not name.startswith(self._translated) and any(each.search(name) for each in self._ignored)
