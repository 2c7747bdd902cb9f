"""Fill chunks of local tensors from a checkpoint, whatever chunks that was saved in."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.reader import PieceReader
from smpkit.torch.checkpoints.state_entries import Chunk, view_of

__all__ = ["Target", "read_into"]


@dataclass(frozen=True)
class Target:
    """A tensor to fill, and what of the whole one it is."""

    tensor: torch.Tensor
    chunks: Sequence[Chunk]


def read_into(reader: PieceReader, targets: Mapping[str, Target], objects: Iterable[str] = ()) -> dict[str, Any]:
    """Fill the targets, by their names in the checkpoint; return the other things that were asked for.

    Reads nothing but the chunks. All names must be in the checkpoint.

    Raises:
        CheckpointError: a part of a chunk is not there, or a file is damaged.
    """
    planner = _ChunkPlanner(targets, tuple(objects))
    planner.set_up_planner({}, reader.read_metadata())
    with torch.no_grad():
        try:
            reader.read_data(planner.create_local_plan(), planner)
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{reader.folder} is damaged: {error}") from error
    return planner.objects


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
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        target = self._targets[index.fqn]
        local_start = target.chunks[index.index].local_start
        offsets = [first + offset for first, offset in zip(local_start, read_item.dest_offsets, strict=True)]
        return view_of(target.tensor, offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass  # it was written in place


def _check_covered(name: str, reads: Sequence[ReadItem], chunks: Sequence[Chunk]) -> None:
    found = sum(math.prod(read.lengths) for read in reads)
    wanted = sum(math.prod(chunk.sizes) for chunk in chunks)
    if found != wanted:
        raise CheckpointError(
            f"the checkpoint holds {found} of the {wanted} elements of `{name}` that this rank needs",
            hint="other degrees need all files of a checkpoint: keep it on a file system that all hosts share",
        )
