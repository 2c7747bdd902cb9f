"""Read checkpoints through the interfaces of `torch.distributed.checkpoint`: what is where, and only what is needed.

A `PieceReader` knows the chunks in the files of one folder; `read_into` fills this rank's chunks of tensors from them,
whatever chunks they were saved in. A partial checkpoint lists its chunks in `pieces.json`, which is plain JSON::

    "model.wte.weight": {"dtype": "float32", "shape": [50257, 768],
                         "pieces": [[file, keys in it, offsets, sizes, offsets in the saved tensor], ...]}

Files are mapped, not read, so asking for a slice reads a slice. They hold tensors and plain values only. In format 2,
tensors are in files of `torch.save`, in nested dicts; nothing but `CheckpointReader._open` knows.
"""

from __future__ import annotations

import io
import math
import os
from abc import abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
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
from smpkit.torch.checkpoints import objects, safetensors
from smpkit.torch.checkpoints.folder import Index, find_damage, read_index, read_json
from smpkit.torch.checkpoints.integrity import Member, find_corruption, members_of, whole_file
from smpkit.torch.checkpoints.save_load import read_file
from smpkit.torch.checkpoints.state_entries import Chunk, StateEntry, chunks_of, view_of

__all__ = [
    "PIECES",
    "CheckpointReader",
    "Piece",
    "PieceReader",
    "StateReader",
    "Target",
    "describe",
    "members_in",
    "merge_pieces",
    "metadata_of",
    "present_files",
    "read_into",
    "read_whole",
    "with_names",
]

PIECES: Final = "pieces.json"


@dataclass(frozen=True)
class Piece:
    """Where a chunk of a tensor, or another value, is stored.

    Args:
        file: name of the file.
        key: where in the file: the name of a tensor, or the keys of nested dicts.
        local_start: offsets of the chunk in the tensor of the file.
    """

    file: str
    key: tuple[str | int, ...]
    local_start: tuple[int, ...] = ()


class PieceReader(StorageReader):
    """Reads pieces from the files of one folder, for `torch.distributed.checkpoint`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        """What the checkpoint holds."""
        if self._metadata is None:
            self._metadata = self._describe()
        return self._metadata

    def tensor(self, name: str) -> TensorStorageMetadata:
        """Return shape and dtype of a tensor, and its chunks."""
        item = self.metadata.state_dict_metadata[name]
        assert isinstance(item, TensorStorageMetadata)
        return item

    @abstractmethod
    def _describe(self) -> Metadata:
        """Return what the checkpoint holds, with a Piece for each MetadataIndex in `storage_data`."""

    @abstractmethod
    def _open(self, path: Path) -> Any:
        """Open a file, without reading all of it."""

    def is_missing(self, name: str) -> bool:
        """Return whether a part of a tensor is in a file that is not in this folder."""
        return False

    def _check_files(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if a file is on another host only."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare another read."""
        if checkpoint_id is not None:
            self.folder, self._metadata = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the reader knows its own metadata."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this can be the folder of a checkpoint."""
        return Path(checkpoint_id).is_dir()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, one file after the other."""
        pieces: Mapping[MetadataIndex, Piece] = self.metadata.storage_data
        by_file: dict[str, list[tuple[Piece, ReadItem]]] = {}  # so that each file is opened once
        for item in plan.items:
            piece = pieces[item.storage_index]
            by_file.setdefault(piece.file, []).append((piece, item))
        self._check_files(by_file)
        for file, wanted in by_file.items():
            content = self._open(self.folder / file)
            for piece, item in wanted:
                self._read(content, piece, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, content: Any, piece: Piece, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO and isinstance(planner, _ChunkPlanner):
            planner.objects[item.dest_index.fqn] = _find(content, piece.key)
            return
        if item.type == LoadItemType.BYTE_IO:
            buffer = io.BytesIO()  # planners take objects as the bytes of a file of `torch.save`
            objects.dump(_find(content, piece.key), buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)
            return
        offsets = [
            local_start + offset for local_start, offset in zip(piece.local_start, item.storage_offsets, strict=True)
        ]
        source = view_of(_find(content, piece.key), offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        target.copy_(source)
        planner.commit_tensor(item, target)


class CheckpointReader(PieceReader):
    """Reads a partial checkpoint of `smp.save_checkpoint` for `torch.distributed.checkpoint`.

    ::

        reader = smp.CheckpointReader("checkpoints/step_100_partial")
        state = {"model": model.state_dict()}          # a plain model, or one of DTensors
        torch.distributed.checkpoint.load(state, storage_reader=reader)

    Names are `model.` + the parameter's, and `optim.state.` + the parameter's + `.exp_avg`, say.

    Args:
        verify_checksums: compare the files with the checksums they were saved with, each before it is read from.
        weights_only: False also loads objects of classes that `smp.load` refuses, which can run any code.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or is damaged.
    """

    _missing: Container[str] | None = None

    def __init__(
        self, folder: str | os.PathLike[str], verify_checksums: bool = True, weights_only: bool | None = None
    ) -> None:
        super().__init__(folder)
        self._verify_checksums = verify_checksums
        self._weights_only = weights_only
        self._verified = set[str]()
        self._index: Index | None = None

    def _describe(self) -> Metadata:
        self._index = index = read_index(self.folder)
        if damage := find_damage(self.folder, index):
            raise CheckpointError(damage)
        self._missing, self._verified = None, set()
        self._verify([PIECES])
        try:
            spec = read_json(self.folder / PIECES)
            return metadata_of(_of_files_here(spec, present_files(self.folder, index)), index.files)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.folder / PIECES} is damaged: {error!r}") from error

    def is_missing(self, name: str) -> bool:
        """Return whether a part of a tensor is in a file that is on another host only."""
        pieces: Mapping[MetadataIndex, Piece] = self.metadata.storage_data
        if self._missing is None:
            self._missing = {index.fqn for index, piece in pieces.items() if self._is_absent(piece.file)}
        return name in self._missing

    def _is_absent(self, file: str) -> bool:
        return self._index is not None and bool(self._index.hosts) and not (self.folder / file).is_file()

    def _check_files(self, names: Iterable[str]) -> None:
        if lacking := sorted(filter(self._is_absent, names)):
            hosts = () if self._index is None else self._index.hosts
            writers = {name: writer for host in hosts for name, writer in host.items()}
            missing = ", ".join(f"`{name}` (saved by {writers.get(name, 'another host')})" for name in lacking)
            raise CheckpointError(
                f"{self.folder} lacks {missing}",
                hint="when it was saved, hosts had a folder each: copy these files here from there, or resume on the "
                "same hosts with the same degrees",
            )
        self._verify(names)

    def places(self) -> dict[str, tuple[object, ...]]:
        """Return where the parts of each tensor lie, by name: names of the same places are of one, tied, tensor."""
        pieces: Mapping[MetadataIndex, Piece] = self.metadata.storage_data
        found = dict[str, tuple[object, ...]]()
        for index, piece in pieces.items():
            found[index.fqn] = (*found.get(index.fqn, ()), (index.offset, piece))
        return found

    def _verify(self, names: Iterable[str]) -> None:
        new = set(names) - self._verified if self._verify_checksums and self._index is not None else set()
        if self._index is not None and (corruption := find_corruption(members_in(self.folder, self._index, new))):
            raise CheckpointError(corruption)
        self._verified |= new

    def _open(self, path: Path) -> Any:
        # Mapped: only the slices in use are read.
        if path.suffix == safetensors.SUFFIX:
            return safetensors.map_tensors(path)
        return read_file(path, "cpu", weights_only=self._weights_only, mmap=True)


def present_files(folder: Path, index: Index) -> list[str]:
    """Return which files of a partial checkpoint are in its folder; others may be on the hosts that saved them."""
    return [name for name in index.files if (folder / name).is_file()]


def members_in(folder: Path, index: Index, names: Iterable[str]) -> list[Member]:
    """Return what has a checksum in these files of a partial checkpoint, which are in the folder.

    Raises:
        CheckpointError: a file is damaged.
    """
    found: list[Member] = []
    for name in names:
        if name.endswith(safetensors.SUFFIX):
            found += safetensors.members_of(folder / name, index.checksums.get(name, 0))
        elif name in index.checksums:
            found.append(whole_file(folder / name, index.checksums[name]))
        elif name in index.files and name.endswith(".pt"):
            found += members_of(folder / name)
    return found


class StateReader(PieceReader):
    """Reads a whole state dict that is already in memory, or mapped.

    Args:
        path: where it comes from, for messages.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._values = values

    def _describe(self) -> Metadata:
        spec = {}
        for name, value in self._values.items():
            if isinstance(value, torch.Tensor):
                zeros = (0,) * value.dim()
                dtype = str(value.dtype).removeprefix("torch.")
                piece = ["", [name], zeros, value.shape, zeros]
                spec[name] = {"dtype": dtype, "shape": value.shape, "pieces": [piece]}
            else:
                spec[name] = {"pieces": [["", [name]]]}
        return metadata_of(spec, {"": None})

    def _open(self, path: Path) -> Any:
        return self._values


@dataclass(frozen=True)
class Target:
    """A tensor to fill, and the chunks of the whole tensor that it holds."""

    tensor: torch.Tensor
    chunks: Sequence[Chunk]


def read_into(reader: PieceReader, targets: Mapping[str, Target], objects: Iterable[str] = ()) -> dict[str, Any]:
    """Fill the targets, given by their names in the checkpoint; return the other values (`objects`) by name.

    Reads only these chunks. All names must be in the checkpoint.

    Raises:
        CheckpointError: the checkpoint lacks a part of a chunk, or a file is damaged.
    """
    planner = _ChunkPlanner(targets, tuple(objects))
    planner.set_up_planner({}, reader.read_metadata())
    with torch.no_grad():
        try:
            reader.read_data(planner.create_local_plan(), planner)
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{reader.folder} is damaged: {error}") from error
    return planner.objects


def read_whole(reader: PieceReader, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a whole tensor of a checkpoint, in the host's memory.

    Args:
        dtype: of the result; that of the checkpoint if not given.
    """
    item = reader.metadata.state_dict_metadata[name]
    assert isinstance(item, TensorStorageMetadata)
    tensor = torch.empty(item.size, dtype=dtype or item.properties.dtype, device="cpu")
    read_into(reader, {name: Target(tensor, chunks_of(item.size))})
    return tensor


class _ChunkPlanner(LoadPlanner):
    """Plans and receives what one rank reads; every rank reads for itself, so there is no global plan."""

    def __init__(self, targets: Mapping[str, Target], objects: Sequence[str]) -> None:
        self._targets = targets
        self._wanted = objects
        self._items: Mapping[str, Any] = {}
        self.objects: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._items = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, target in self._targets.items():
            found = self._items[name]
            assert isinstance(found, TensorStorageMetadata)
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in target.chunks
            ]
            reads = create_read_items_for_chunk_list(name, found, chunks)
            _check_covered(name, reads, target.chunks)
            items += reads
        for name in self._wanted:
            index = MetadataIndex(name)
            nothing = torch.Size(())
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = objects.load(value, quiet=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        target = self._targets[index.fqn]
        local_start = target.chunks[index.index].local_start
        offsets = [first + offset for first, offset in zip(local_start, read_item.dest_offsets, strict=True)]
        return view_of(target.tensor, offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass  # `resolve_tensor` returned a view of the target


def _check_covered(name: str, reads: Sequence[ReadItem], chunks: Sequence[Chunk]) -> None:
    found = sum(math.prod(read.lengths) for read in reads)
    wanted = sum(math.prod(chunk.sizes) for chunk in chunks)
    if found != wanted:
        raise CheckpointError(
            f"the checkpoint holds {found} of the {wanted} elements of `{name}` that this rank needs",
            hint="other degrees need all files of a checkpoint: keep it on a file system that all hosts share",
        )


def describe(entry: StateEntry, file: str, key: str) -> dict[str, Any]:
    """Return what `pieces.json` says of an entry that is written to a file under a key."""
    if entry.shape is None:
        return {"pieces": [[file, [key]]]}
    pieces = [[file, [key], chunk.offsets, chunk.sizes, chunk.local_start] for chunk in entry.chunks]
    return {"dtype": str(entry.value.dtype).removeprefix("torch."), "shape": entry.shape, "pieces": pieces}


def with_names(pieces: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return `describe` with other names of files."""
    return {
        name: {**spec, "pieces": [[names[file], *piece] for file, *piece in spec["pieces"]]}
        for name, spec in pieces.items()
    }


def merge_pieces(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the descriptions of several ranks; hosts with a folder each may have the same chunk in several files."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, spec in part.items():
            known = whole.setdefault(name, {**spec, "pieces": []})["pieces"]
            known += [piece for piece in spec["pieces"] if piece not in known]
    return whole


def _of_files_here(pieces: Mapping[str, Any], present: Container[str]) -> dict[str, Any]:
    """Return each chunk once: the first of those whose file is here, else the first of all."""
    result = {}
    for name, spec in pieces.items():
        chosen: dict[object, Any] = {}
        for piece in sorted(spec["pieces"], key=lambda piece: piece[0] not in present):
            chosen.setdefault(_chunk_offsets(piece), piece)
        result[name] = {**spec, "pieces": [*chosen.values()]}
    return result


def _chunk_offsets(piece: Sequence[Any]) -> object:
    return tuple(piece[2]) if len(piece) > 2 else None


def metadata_of(spec: Mapping[str, Any], files: Mapping[str, int | None]) -> Metadata:
    """Return the content of `pieces.json` as metadata of torch's distributed checkpoints.

    Args:
        files: the sizes in bytes of the checkpoint's files, None where that is not known.

    Raises:
        ValueError: a file is not one of `files`, a dtype not one of torch's, or a tensor larger than its files.
        KeyError, TypeError: the content is damaged otherwise.
    """
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    pieces: dict[MetadataIndex, Piece] = {}
    for name, each in spec.items():
        dtype = getattr(torch, each["dtype"]) if "shape" in each else None
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"{each['dtype']} is no dtype")
        chunks, num_elements = [], 0
        for file, key, *chunk in each["pieces"]:
            if file not in files:  # damaged or forged: it could name any file of this machine
                raise ValueError(f"{file} is no file of this checkpoint")
            if not chunk:
                pieces[MetadataIndex(name, None)] = Piece(file, tuple(key))
                continue
            offsets, sizes, local_start = (tuple(map(int, numbers)) for numbers in chunk)
            # Readers allocate memory by these numbers.
            room = files[file]
            if min((*offsets, *sizes, *local_start), default=0) < 0 or (
                dtype is not None and room is not None and math.prod(sizes) * dtype.itemsize > room
            ):
                raise ValueError(f"`{name}` cannot have {list(sizes)} elements in {file}")
            pieces[MetadataIndex(name, offsets)] = Piece(file, tuple(key), local_start)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            num_elements += math.prod(sizes)
        if dtype is not None:
            shape = torch.Size(each["shape"])
            if min(shape, default=0) < 0 or math.prod(shape) > num_elements:
                raise ValueError(f"`{name}` of shape {list(shape)} has only {num_elements} elements")
            items[name] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
        else:
            items[name] = BytesStorageMetadata()
    # torch's own tools nest what they read by this: {"model": {"wte.weight": ...}, ...}.
    nesting = {name: _nesting(name) for name in items}
    return Metadata(items, planner_data=nesting, storage_data=pieces)


def _nesting(name: str) -> tuple[str, ...]:
    kind, _, rest = name.partition(".")
    if kind == "optim" and rest.startswith("state."):
        parameter, _, key = rest.removeprefix("state.").rpartition(".")
        return kind, "state", parameter, key
    return (kind, rest) if rest else (kind,)


def _find(content: Any, key: Sequence[str | int]) -> Any:
    for part in key:
        content = content[part]
    return content
