"""Save and load folders like Hugging Face's `save_pretrained`: `config.json`, safetensors files and their index.

The files of transformers begin with `model`, those of diffusers with `diffusion_pytorch_model`.

Rank 0 writes what the ranks deliver tensor by tensor (`whole.py`); each rank reads only the slices that it needs
(`load.py`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import nn

from smpkit.errors import CheckpointError, UsageError
from smpkit.torch.checkpoints import folder as files
from smpkit.torch.checkpoints.agreement import all_or_raise, go_on
from smpkit.torch.checkpoints.entries import wrapped_model
from smpkit.torch.checkpoints.load import load_model
from smpkit.torch.checkpoints.reader import Reader, whole_tensor
from smpkit.torch.checkpoints.tensors import bytes_of, header_of, open_tensors, specs_in
from smpkit.torch.checkpoints.whole import WholeState
from smpkit.torch.core.runtime import state
from smpkit.torch.model import DistributedModel
from smpkit.torch.model_parts import is_of_diffusers
from smpkit.torch.placement.delayed import run_deferred_loads
from smpkit.torch.tensor_parallel.replace import applied_rule_of
from smpkit.torch.tensor_parallel.state_dict import replaced_modules

_INDEX: Final = ".safetensors.index.json"
_WEIGHT_FILES: Final = re.compile(
    r"(diffusion_pytorch_)?model((-\d{5}-of-\d{5})?\.safetensors|\.safetensors\.index\.json)|.*pytorch_model.*\.bin.*"
)
_STAGED: Final = "weights"
_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_pretrained(
    folder: str | os.PathLike[str], model: DistributedModel | None = None, max_shard_size: int | str = "5GB"
) -> None:
    """Write the whole model to a folder that `AutoModel.from_pretrained` loads; called by all ranks.

    The ranks deliver one whole tensor after the other to rank 0, which writes them, so none needs memory for more.
    Modules that tensor parallelism has replaced are translated back. Files appear complete, the index last; other files
    in the folder (a tokenizer's) are kept. For a model without a `config` only safetensors files are written.

    Args:
        model: the wrapped model; the last one that was wrapped if not given.
        max_shard_size: bytes of tensors in one file, as a number or as "5GB".

    Raises:
        CheckpointError: on all ranks, if one cannot write its part; it names the rank.
        UsageError: there is no model, it has adapters of PEFT, or `max_shard_size` is no size.
    """
    model, target, limit = wrapped_model(model), files.folder_at(folder), _bytes_of(max_shard_size)
    if getattr(model.module, "peft_config", None):
        raise UsageError(
            "the model has adapters of peft, and nothing would find its weights by the names that they give them",
            hint="all ranks call `whole = model.original_state_dict()`, and one saves the adapters:"
            " `model.get_module().save_pretrained(folder, state_dict=whole)`, or for diffusers what peft's"
            " `get_peft_model_state_dict(model.get_module(), state_dict=whole)` returns",
        )
    failure = f"the model was not saved to {target}"
    all_or_raise(failure, run_deferred_loads)
    whole = all_or_raise(failure, lambda: WholeState(model, translate=True))
    tied = _tied_names(model.module)
    specs = {name: spec for name, spec in whole.specs.items() if name not in tied}
    shards = _split_by_size(_stem_of(model.module), specs, limit)
    with contextlib.closing(_Folder(target, model.module, shards)) as hub:
        all_or_raise(failure, lambda: hub.begin() if state.rank == 0 else None)
        whole.deliver(hub.write, failure)
        all_or_raise(failure, lambda: hub.publish() if state.rank == 0 else None)


def load_pretrained(
    folder: str | os.PathLike[str],
    model: DistributedModel | None = None,
    strict: bool = True,
) -> None:
    """Load the weights of a Hugging Face folder (safetensors) into the wrapped model; called by all ranks.

    Every rank reads the slices that it holds. With a pipeline, parameters without memory
    (`smp.delay_param_initialization`) are read in the first step, so no rank ever holds the whole model.

    Args:
        model: the wrapped model; the last one that was wrapped if not given.
        strict: raise if names differ, apart from those that the model's class ignores.

    Raises:
        CheckpointError: on all ranks, if there are no safetensors, they are damaged, or they belong to another model.
        UsageError: there is no model.
    """
    wrapped, path = wrapped_model(model), Path(folder)

    def load() -> None:
        load_model(wrapped, _reader_of(path, wrapped.module), strict, prefix="")

    all_or_raise(f"{path} was not loaded", load)


# --- writing ----------------------------------------------------------------------------------------------------------


def _bytes_of(size: object) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", size.strip(), re.IGNORECASE)
        if match is not None:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    raise UsageError(f"max_shard_size is {size!r}", hint='use a number of bytes, or a size such as "5GB" or "200MB"')


def _tied_names(root: nn.Module) -> Mapping[str, str]:
    """Return the names that a Hugging Face model ties to others, if its configuration enables that."""
    config = getattr(root, "config", None)
    tied = getattr(_original_class(root), "_tied_weights_keys", None)
    if not getattr(config, "tie_word_embeddings", False) or not isinstance(tied, Mapping):
        return {}
    return tied


Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by name."""


def _stem_of(root: nn.Module) -> str:
    return "diffusion_pytorch_model" if is_of_diffusers(root) else "model"


def _split_by_size(stem: str, specs: Specs, limit: int) -> dict[str, Specs]:
    """Return the tensors of each file by its name; none is larger than `limit`, unless it has a single tensor."""
    parts: list[Specs] = [{}]
    used = 0
    for name, (shape, dtype) in specs.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if parts[-1] and used + size > limit:
            parts.append({})
            used = 0
        parts[-1][name] = shape, dtype
        used += size
    if len(parts) == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


class _Folder:
    """A folder of the hub as rank 0 writes it: hidden in its target until all of it is there."""

    def __init__(self, target: Path, root: nn.Module, shards: Mapping[str, Specs]) -> None:
        self._target, self._root, self._shards = target, root, shards
        # In the target itself: what is beside it may be of other saves, or on another disk.
        self._staged = files.staging_path(target, _STAGED)
        self._file_of = {name: file for file, part in shards.items() for name in part}
        self._file: BinaryIO | None = None
        self._offsets: dict[str, int] = {}
        self._unflushed = 0

    def begin(self) -> None:
        """Make it, with what is not a tensor."""
        specs = [spec for part in self._shards.values() for spec in part.values()]
        with files.as_checkpoint_error(f"{self._target} cannot be written"):
            self._target.mkdir(parents=True, exist_ok=True)
            for leftover in self._target.glob(f".{_STAGED}.*.tmp"):  # of a save that died
                shutil.rmtree(leftover, ignore_errors=True)
            self._staged.mkdir()
            if len(self._shards) > 1:
                size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs)
                text = json.dumps({"metadata": {"total_size": size}, "weight_map": self._file_of}, indent=2)
                index = f"{_stem_of(self._root)}{_INDEX}"
                files.fsync_write(self._staged / index, lambda file: file.write(text.encode()))
            _write_config(self._staged, self._root, {dtype for _, dtype in specs})

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write a tensor to its file, one file after the other; a tensor of no file, as a tied weight, is left out."""
        if name not in self._file_of:
            return
        with files.as_checkpoint_error(f"{self._file_of[name]} cannot be written"):
            if name not in self._offsets:
                self._finish_file()
                header, self._offsets = header_of(self._shards[self._file_of[name]])
                self._file = (self._staged / self._file_of[name]).open("wb")
                self._file.write(header)
            assert self._file is not None
            self._file.seek(self._offsets[name])
            for piece in files.pieces_of(bytes_of(value)):
                self._file.write(piece)
                self._unflushed += len(piece)
                if self._unflushed > files.FLUSHED_BYTES:
                    self._flush(self._file)
                go_on()

    def _flush(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        self._unflushed = 0

    def _finish_file(self) -> None:
        if self._file is not None:
            self._flush(self._file)
            self._file.close()

    def publish(self) -> None:
        """Move all into the target, and remove weights of an older save there."""
        with files.as_checkpoint_error(f"{self._target} cannot be written"):
            self._finish_file()
            # The index last, which names the others.
            written = sorted(self._staged.iterdir(), key=lambda path: path.name.endswith(_INDEX))
            for path in written:
                path.replace(self._target / path.name)
            names = {path.name for path in written}
            for path in self._target.iterdir():
                if path.name not in names and _WEIGHT_FILES.fullmatch(path.name):  # of an older save
                    path.unlink()
            files.sync_folder(self._target)

    def close(self) -> None:
        """Remove what was not published."""
        with contextlib.suppress(OSError):  # a full disk has been told of
            if self._file is not None:
                self._file.close()
        shutil.rmtree(self._staged, ignore_errors=True)


def _write_config(staged: Path, root: Any, dtypes: set[torch.dtype]) -> None:
    """Write the configuration of a Hugging Face model, as `save_pretrained` would."""
    if is_of_diffusers(root):
        root.save_config(staged)
        return
    known = getattr(root, "config", None)
    if known is None or not hasattr(known, "save_pretrained"):
        return
    config: Any = copy.deepcopy(known)
    config.architectures = [_original_class(root).__name__]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    if len(floating) == 1:
        config.dtype = str(floating[0]).removeprefix("torch.")
    config.save_pretrained(staged)
    generation = getattr(root, "generation_config", None)
    if generation is not None and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(staged)


def _original_class(root: nn.Module) -> type[nn.Module]:
    """Return the script's own class of a model; tensor parallelism may have replaced the whole model."""
    entry = applied_rule_of(root)
    return type(root) if entry is None else entry.original_class


# --- reading ----------------------------------------------------------------------------------------------------------


def _reader_of(folder: Path, root: nn.Module) -> Reader:
    stored: dict[str, Any] = {}
    for file in _files_in(folder, _stem_of(root)):
        with open_tensors(folder / file) as opened:
            stored |= {key: whole_tensor(file, key, *spec) for key, spec in specs_in(opened).items()}
    return Reader(folder, {name: stored[key] for key, name in _own_names(root, list(stored)).items()})


def _files_in(folder: Path, stem: str) -> list[str]:
    index = folder / f"{stem}{_INDEX}"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names files outside of its folder")
        return sorted(names)
    if (folder / f"{stem}.safetensors").is_file():
        return [f"{stem}.safetensors"]
    raise CheckpointError(
        f"{folder} holds no {stem}.safetensors and no {index.name}",
        hint="load a folder with pytorch_model.bin with transformers, and save it again",
    )


def _own_names(root: nn.Module, names: list[str]) -> dict[str, str]:
    """Return a model's names by those in a folder, as `from_pretrained` pairs them.

    Weights of the bare model can be loaded into a model with a head, and the reverse: the name of the bare model
    (`transformer.`) is prepended or removed. Names that the class ignores are left out.
    """
    kind, own = _original_class(root), root.state_dict(keep_vars=True).keys()
    bare = getattr(kind, "base_model_prefix", "")
    prefix, has_head = f"{bare}.", bare in dict(root.named_children())
    is_bare = not any(name.startswith(prefix) for name in names)
    renamed = {name: name for name in names}
    if bare and has_head and is_bare:
        renamed = {name: prefix + name for name in names}
    elif bare and not has_head and not is_bare:  # leave out the head's weights
        renamed = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    # Names inside a replaced module are never ignored: only its translation knows which of them it needs.
    translated = tuple(f"{name}." if name else "" for name, _, _ in replaced_modules(root))
    ignored = [re.compile(pattern) for pattern in getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def is_wanted(name: str) -> bool:
        return name in own or name.startswith(translated) or not any(pattern.search(name) for pattern in ignored)

    return {name: own_name for name, own_name in renamed.items() if is_wanted(own_name)}
