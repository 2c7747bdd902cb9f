"""Read checkpoints through the interfaces of `torch.distributed.checkpoint`: what is where, and only what is needed.

A `Reader` knows the chunks in the files of one folder; `read_into` fills this rank's chunks of tensors from them,
whatever chunks they were saved in. torch says which saved chunk overlaps which (`create_read_items_for_chunk_list`). Of
a file only the slices that are asked for are read.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.agreement import go_on
from smpkit.torch.checkpoints.entries import Chunk, chunks_of, view_of
from smpkit.torch.checkpoints.folder import INDEX, dtype_of, find_corruption, look_at, missing_text, read_index
from smpkit.torch.checkpoints.objects import read_file
from smpkit.torch.checkpoints.tensors import open_tensors

ReadSlice = Callable[[str, Sequence[int], Sequence[int]], torch.Tensor]
"""Returns a slice of a tensor in an open file: its name there, offsets and sizes."""


Piece: TypeAlias = tuple[str, str, Chunk]
"""Where a chunk of a whole tensor is stored: the file, the tensor's name there, and its place in both tensors."""
Stored: TypeAlias = tuple[Sequence[int], torch.dtype, Sequence[Piece]]
"""Shape and dtype of a whole tensor, and its pieces."""


class Reader(StorageReader):
    """Reads pieces of tensors from the files of one folder, for `torch.distributed.checkpoint` too."""

    objects: Collection[str] = ()
    """The names of values that are no tensors."""

    def __init__(self, folder: Path, tensors: Mapping[str, Stored]) -> None:
        super().__init__()
        self.folder = folder
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._pieces: dict[MetadataIndex, Piece] = {}
        for name, (shape, dtype, pieces) in tensors.items():
            self._pieces |= {MetadataIndex(name, piece[-1].offsets): piece for piece in pieces}
            chunks = _torchs([chunk for *_, chunk in pieces])
            self.tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[ReadSlice]:
        """Open a file of safetensors."""
        with open_tensors(self.folder / file) as opened:

            def read(key: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
                if not sizes:
                    return opened.get_tensor(key)  # type: ignore[no-any-return]
                slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
                return opened.get_slice(key)[slices]  # type: ignore[no-any-return]

            yield read

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Return values that are no tensors, by name."""
        raise NotImplementedError

    def places(self) -> dict[str, tuple[object, ...]]:
        """Return where the parts of each tensor lie, by name, if names of the same places are of one, tied, tensor."""
        return {}

    def is_missing(self, name: str) -> bool:
        """Return whether a part of an entry is in a file that is not in this folder."""
        return False

    def check_files(self, names: Collection[str]) -> None:
        """Raise CheckpointError if one of these files, which are read next, is not here, or damaged."""

    def read(self, items: Iterable[ReadItem], place: Callable[[ReadItem, torch.Tensor], None]) -> None:
        """Read the items of a plan, one file after the other, and give each to `place`."""
        by_file: dict[str, list[tuple[str, list[int], ReadItem]]] = {}
        for item in items:
            if 0 in item.lengths:
                continue
            file, key, chunk = self._pieces[item.storage_index]
            at = [start + offset for start, offset in zip(chunk.local_start, item.storage_offsets, strict=True)]
            by_file.setdefault(file, []).append((key, at, item))
        self.check_files(by_file)
        for file, wanted in by_file.items():
            with self.open(file) as read_slice:
                for key, at, item in wanted:
                    place(item, read_slice(key, at, item.lengths))
                    go_on()

    # --- the interface of torch's loader -----------------------------------------------------------------------------

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def place(item: ReadItem, value: torch.Tensor) -> None:
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)

        self.read([item for item in plan.items if item.type == LoadItemType.TENSOR], place)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self.tensors), storage_data=self._pieces)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


class CheckpointReader(Reader):
    """Reads the tensors of a partial checkpoint of `smp.save_checkpoint` for `torch.distributed.checkpoint`.

    ::

        reader = smp.CheckpointReader("checkpoints/step_100_partial")
        state = {"model": model.state_dict()}          # a plain model, or one of DTensors
        torch.distributed.checkpoint.load(state, storage_reader=reader)

    Names are `model.` + the parameter's, and `optim.state.` + the parameter's + `.exp_avg`, say.

    Args:
        verify_checksums: compare the files with the checksums they were saved with, each before it is read from.
        missing: the files that are not in the folder, as those of hosts with folders of their own, if all files have
            been looked at already.
        weights_only: False also loads objects of classes that `smp.load` refuses, which can run any code.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or is damaged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        verify_checksums: bool = True,
        *,
        missing: Collection[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        path = Path(folder)
        self._save = _file_of(path / INDEX)
        self.index = read_index(path)
        if missing is None:
            damage, missing = look_at(path, self.index, self.index.files)
            if damage := damage or missing_text(path, self.index, missing):
                raise CheckpointError(damage)
        self._missing = frozenset(missing)
        self.weights_only, self._verify_checksums = weights_only, verify_checksums
        self._to_verify = set(self.index.files) if verify_checksums else set[str]()
        super().__init__(path, {name: self._describe(spec) for name, spec in self.index.tensors.items()})
        self.objects = self.index.objects.keys()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and Path(checkpoint_id) != self.folder:
            type(self).__init__(self, checkpoint_id, self._verify_checksums, weights_only=self.weights_only)

    def _describe(self, spec: Mapping[str, Any]) -> Stored:
        pieces: dict[tuple[int, ...], Piece] = {}
        # Ranks of several file systems write the same chunk: the first counts that is here, or else the first of all.
        for file, key, *numbers in sorted(spec["pieces"], key=lambda piece: piece[0] in self._missing):
            chunk = Chunk(*map(tuple, numbers))
            pieces.setdefault(chunk.offsets, (file, key, chunk))
        return spec["shape"], dtype_of(spec), [*pieces.values()]

    def places(self) -> dict[str, tuple[object, ...]]:
        return {name: tuple(map(repr, spec["pieces"])) for name, spec in self.index.tensors.items()}

    def is_missing(self, name: str) -> bool:
        if name in self.objects:
            return self._missing.issuperset(self.index.objects[name])
        chunks = self.tensors[name].chunks
        return any(self._pieces[MetadataIndex(name, chunk.offsets)][0] in self._missing for chunk in chunks)

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        file_of = {name: min(self.index.objects[name], key=lambda file: file in self._missing) for name in names}
        self.check_files(set(file_of.values()))
        read = functools.cache(lambda file: read_file(self.folder / file, "cpu", weights_only=self.weights_only))
        return {name: read(file)[name] for name, file in file_of.items()}

    def read(self, items: Iterable[ReadItem], place: Callable[[ReadItem, torch.Tensor], None]) -> None:
        super().read(items, place)
        # What is gone by now was there when it was read; files of another save may have been among those read.
        if _file_of(self.folder / INDEX) not in (self._save, None):
            raise CheckpointError(
                f"another save replaced {self.folder} while it was read",
                hint="read it again; checkpoints that are read while a job saves have a tag of their own each",
            )

    def check_files(self, names: Collection[str]) -> None:
        if lacking := sorted(self._missing.intersection(names)):
            entries = {name: self.index.files[name] for name in lacking}
            text = ", ".join(f"`{name}` (saved by rank {e['rank']} on {e['host']})" for name, e in entries.items())
            raise CheckpointError(
                f"{self.folder} lacks {text}",
                hint="when it was saved, hosts had a folder each: copy these files here from there, or resume on the "
                "same hosts with the same degrees",
            )
        new = self._to_verify.intersection(names)
        crcs = {self.folder / name: self.index.files[name]["crc32"] for name in sorted(new)}
        if corruption := find_corruption(crcs):
            raise CheckpointError(corruption)
        self._to_verify -= new


def _file_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from one that takes its place; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


class StateReader(Reader):
    """Reads a whole state dict that is in memory, or mapped from `path`."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._values = values
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        super().__init__(path, {name: whole_tensor("", name, t.shape, t.dtype) for name, t in tensors.items()})
        self.objects = values.keys() - tensors.keys()

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[ReadSlice]:
        yield lambda key, offsets, sizes: view_of(self._values[key], offsets, sizes)

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._values[name] for name in names}


def whole_tensor(file: str, key: str, shape: Sequence[int], dtype: torch.dtype) -> Stored:
    """Return what a `Reader` is told of a tensor that a file has as a whole."""
    return shape, dtype, [(file, key, chunk) for chunk in chunks_of(shape)]


def _torchs(chunks: Iterable[Chunk]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks]


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A tensor to fill, and the chunks of the whole tensor that it holds."""

    tensor: torch.Tensor
    chunks: Sequence[Chunk]


def read_into(reader: Reader, targets: Mapping[str, Target]) -> None:
    """Fill the targets, given by their names in the checkpoint, all of which it has; read only these chunks."""

    def place(item: ReadItem, value: torch.Tensor) -> None:
        assert item.dest_index.index is not None
        target = targets[item.dest_index.fqn]
        local_start = target.chunks[item.dest_index.index].local_start
        at = [start + offset for start, offset in zip(local_start, item.dest_offsets, strict=True)]
        view_of(target.tensor, at, item.lengths).copy_(value)

    items: list[ReadItem] = []
    for name, target in targets.items():
        overlaps = create_read_items_for_chunk_list(name, reader.tensors[name], _torchs(target.chunks))
        num_saved = sum(math.prod(item.lengths) for item in overlaps)
        num_wanted = sum(math.prod(chunk.sizes) for chunk in target.chunks)
        if num_saved != num_wanted:
            raise CheckpointError(
                f"the checkpoint holds {num_saved} of the {num_wanted} elements of `{name}` that this rank needs",
                hint="other degrees need all files of a checkpoint: keep it on a file system that all hosts share",
            )
        items += overlaps
    with torch.no_grad():
        try:
            reader.read(items, place)
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{reader.folder} is damaged: {error}") from error


def read_whole(reader: Reader, name: str) -> torch.Tensor:
    """Return a whole tensor of a checkpoint, in the host's memory."""
    spec = reader.tensors[name]
    tensor = torch.empty(spec.size, dtype=spec.properties.dtype, device="cpu")
    read_into(reader, {name: Target(tensor, chunks_of(spec.size))})
    return tensor
