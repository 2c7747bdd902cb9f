"""Run something on all ranks: all of them succeed, or all of them raise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smpkit.errors import CheckpointError, SmpkitError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed.objects import allgather
from smpkit.torch.placement.dtensor import local_tensor_of
from smpkit.torch.placement.shards import TpShard, shard_of, shard_range
from smpkit.torch.precision.cast import MASTER_KEY, SCALER_KEY
from smpkit.torch.state_dict import PARTIAL_KEY
from smpkit.torch.tensor_parallel.module import global_shape

__all__ = [
    "GROUPS",
    "MODEL",
    "SCALER",
    "STATES",
    "Chunk",
    "Model",
    "Optimizer",
    "StateEntry",
    "all_or_raise",
    "chunks_in",
    "chunks_of",
    "copy_chunks",
    "model_entries",
    "nested",
    "opaque_state_name",
    "optimizer_entries",
    "optimizer_parameters",
    "parameter_names",
    "runs_of",
    "shard_positions",
    "view_of",
    "wrapped_model",
]

_T = TypeVar("_T")


class Model(Protocol):
    """What is asked of a wrapped model."""

    module: nn.Module
    pipeline: Any
    partitioned: bool

    data_parallel: Any

    def holds(self, parameter: Any) -> bool: ...
    def owns(self, parameter: Any) -> bool: ...
    def random_state(self) -> Mapping[str, int]: ...
    def load_random_state(self, kept: Mapping[str, int]) -> None: ...


class Optimizer(Protocol):
    """What is asked of a wrapped optimizer."""

    masters: Any

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def local_state_dict(self, gather_if_shard: bool = ...) -> dict[str, Any]: ...
    def model_parameter(self, parameter: torch.Tensor) -> torch.Tensor: ...
    def refresh_masters(self) -> None: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


def wrapped_model(model: Model | None = None) -> Model:
    """Return the model that is meant: the last one that was wrapped if none is given.

    Raises:
        UsageError: there is none.
    """
    found: Any = model if model is not None else state.model
    if found is None:
        raise UsageError("there is no model to save or load", hint="wrap it with smp.DistributedModel(...) first")
    return found  # type: ignore[no-any-return]


def all_or_raise(what: str, attempt: Callable[[], _T]) -> _T:
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


# --- Where the tensors of this rank lie in those of the whole model, as chunks ----------------------------------------
# A whole tensor is one chunk. A tensor-parallel piece is one chunk too, unless several things are packed into it: this
# rank's part of a fused query-key-value weight of two ranks is three chunks of the whole one::
#
#     whole  | q q' | k k' | v v' |        rank 0 has q, k and v, side by side: | q | k | v |
#
# They are the chunks of torch's distributed checkpoints.


@dataclass(frozen=True)
class Chunk:
    """A part of a whole tensor that a local one holds.

    Args:
        offsets: of its first element in the whole tensor, by dimension.
        sizes: by dimension.
        local_start: offsets of its first element in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_start: tuple[int, ...]


def chunks_of(shape: Sequence[int], shard: TpShard | None) -> list[Chunk]:
    """Return the chunks of a local tensor of `shape`, which lies as `shard` says; None: it is the whole one."""
    zeros = (0,) * len(shape)
    if shard is None or shard.dim is None:
        return [Chunk(zeros, tuple(shape), zeros)]
    chunks, start, local_start = [], 0, 0
    for part in shard.parts or (shard.shape[shard.dim],):
        first, length = shard_range(part, shard.tp_rank, shard.tp_size)
        offset = _with(zeros, shard.dim, start + first)
        chunks.append(Chunk(offset, _with(shape, shard.dim, length), _with(zeros, shard.dim, local_start)))
        start, local_start = start + part, local_start + length
    return chunks


def chunks_in(tensor: torch.Tensor) -> list[Chunk]:
    """Return the chunks of what this rank holds of a parameter or buffer, as is written on it.

    Sharded data parallelism divides (by a DTensor) what tensor parallelism has left.
    """
    chunks = chunks_of(tensor.shape, shard_of(tensor))
    if not isinstance(tensor, DTensor):
        return chunks
    parts = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    found = [_clipped(chunk, tuple(part.offsets), tuple(part.sizes)) for part in parts for chunk in chunks]
    return [chunk for chunk in found if 0 not in chunk.sizes]


def _clipped(chunk: Chunk, start: Sequence[int], sizes: Sequence[int]) -> Chunk:
    """Return what of a chunk is in a part of the tensor that it is in, and where in the part."""
    first = [max(local_start, begin) for local_start, begin in zip(chunk.local_start, start, strict=True)]
    ends = (
        min(local_start + size, begin + room)
        for local_start, size, begin, room in zip(chunk.local_start, chunk.sizes, start, sizes, strict=True)
    )
    return Chunk(
        tuple(
            offset + begin - local_start
            for offset, begin, local_start in zip(chunk.offsets, first, chunk.local_start, strict=True)
        ),
        tuple(max(end - begin, 0) for end, begin in zip(ends, first, strict=True)),
        tuple(begin - origin for begin, origin in zip(first, start, strict=True)),
    )


def copy_chunks(local: torch.Tensor, whole: torch.Tensor, chunks: Iterable[Chunk]) -> None:
    """Fill the chunks of a local tensor from the whole one."""
    with torch.no_grad():
        for chunk in chunks:
            view_of(local, chunk.local_start, chunk.sizes).copy_(view_of(whole, chunk.offsets, chunk.sizes))


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def view_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a chunk of a tensor, without a copy."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def runs_of(shape: Sequence[int], chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Iterate over the contiguous runs that a chunk is in a row-major whole tensor: first element and length of each.

    They come in the order of the chunk's own elements.
    """
    if 0 in chunk.sizes:
        return
    along = len(shape)  # a run goes along the last dimension that the chunk has not whole, and all behind it
    while along > 0 and chunk.sizes[along - 1] == shape[along - 1]:
        along -= 1
    along = max(along - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    ranges = [range(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    first = [each[0] * stride for each, stride in zip(ranges[along:], strides[along:], strict=True)]
    for index in itertools.product(*ranges[:along]):
        outer = sum(i * stride for i, stride in zip(index, strides[:along], strict=True))
        yield outer + sum(first), math.prod(chunk.sizes[along:])


# --- What this rank holds of a model and its optimizer, entry by entry, and which other ranks hold the same -----------
# From this alone each rank knows what to write: of the ranks that share a file system and hold the same, the lowest
# writes it. So a weight that several ranks hold is saved once.


MODEL: Final = "model."
STATES: Final = "optim.state."
GROUPS: Final = "optim.param_groups"
SCALER: Final = "optim.loss_scaler"
_MASTERS: Final = "masters"


@dataclass(frozen=True)
class StateEntry:
    """One thing that this rank holds.

    Args:
        name: in the checkpoint, as torch's distributed checkpoints name things: `model.wte.weight`.
        value: a tensor, or something else that `torch.save` takes.
        key: where it is in the file that its kind is written to: the keys of nested dicts.
        shape: of the whole tensor; None for other things.
        chunks: what of the whole tensor it is.
        holders: the ranks that hold the same.
    """

    name: str
    value: Any
    key: tuple[str | int, ...]
    shape: tuple[int, ...] | None
    chunks: tuple[Chunk, ...]
    holders: frozenset[int]

    @property
    def is_of_half_precision(self) -> bool:
        """Whether it is a master weight or the loss scale."""
        return not self.name.startswith(MODEL) and self.key[:1] in ((_MASTERS,), (SCALER_KEY,))


def model_entries(model: Model) -> list[StateEntry]:
    """Return what this rank holds of a model's state dict, tied weights under each of their names."""
    found = []
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and not model.holds(value):
            continue
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            continue
        found.append(_entry(f"{MODEL}{name}", value, (name,), value, _holders_of(model, value)))
    return found


def optimizer_entries(optimizer: Optimizer, model: Model) -> list[StateEntry]:
    """Return what this rank holds of an optimizer's state.

    States are named by their parameter, because its number depends on the parameter groups. A state of its parameter's
    shape is divided as the parameter is; any other one of a divided parameter is for this very division only.
    """
    saved = optimizer.local_state_dict(gather_if_shard=False)
    del saved[PARTIAL_KEY]
    if not _has_torch_layout(saved):
        return [
            StateEntry(opaque_state_name(), saved, (), None, (), _holders(frozenset({state.pp_rank}), state.tp_rank))
        ]
    parameters, names = optimizer_parameters(optimizer), parameter_names(optimizer, model)
    everywhere = _holders(frozenset(range(state.pp_size)), None)
    found = [StateEntry(GROUPS, saved["param_groups"], ("param_groups",), None, (), everywhere)]
    if SCALER_KEY in saved:
        found.append(StateEntry(SCALER, saved[SCALER_KEY], (SCALER_KEY,), None, (), everywhere))
    for index, states in saved["state"].items():
        parameter, name = parameters[index], names[index]
        if not model.owns(parameter):
            continue
        holders = _state_holders(model, parameter)
        for key, value in states.items():
            full = f"{STATES}{_state_name(name, key, value, parameter)}"
            place = (_MASTERS, index) if key == MASTER_KEY else ("state", index, key)
            found.append(_entry(full, value, place, parameter, holders))
    return found


def parameter_names(optimizer: Optimizer, model: Model) -> list[str]:
    """Return the name of each parameter of an optimizer, in the order of torch's state dicts."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    return [names.get(id(parameter), f"#{index}") for index, parameter in enumerate(optimizer_parameters(optimizer))]


def opaque_state_name() -> str:
    """Return the name of an optimizer's state that is not torch's: nobody knows how to divide it otherwise."""
    return _name_for_shard("optim.whole", (state.pp_rank, state.pp_size), (state.tp_rank, state.tp_size))


def _state_name(name: str, key: object, value: object, parameter: torch.Tensor) -> str:
    shared = not isinstance(value, torch.Tensor) or value.dim() == 0 or _is_sharded_like(value, parameter)
    if shared or not _is_sharded(parameter):
        return f"{name}.{key}"
    return _name_for_shard(f"{name}.{key}", *shard_positions(parameter))


def shard_positions(parameter: torch.Tensor) -> list[tuple[int, int]]:
    """Return which part of how many this rank has of a parameter; nothing of one that is not divided."""
    places = []
    shard = shard_of(parameter)
    if shard is not None and shard.is_distributed:
        places.append((shard.tp_rank, shard.tp_size))
    if isinstance(parameter, DTensor):
        places.append((state.rank, state.size))
    return places


def _is_sharded(parameter: torch.Tensor) -> bool:
    return bool(shard_positions(parameter))


def _is_sharded_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tell whether a state is divided as its parameter is."""
    return local_tensor_of(value).shape == local_tensor_of(parameter).shape  # type: ignore[no-any-return]


def _name_for_shard(name: str, *places: tuple[int, int]) -> str:
    """Return the name of what only a rank at these places (which of how many) can use."""
    return name + "".join(f"@{index}of{size}" for index, size in places)


def nested(entries: Iterable[StateEntry]) -> dict[Any, Any]:
    """Return entries as the nested dicts that a file holds."""
    root: dict[Any, Any] = {}
    for entry in entries:
        if not entry.key:
            return dict(entry.value)
        place = root
        for part in entry.key[:-1]:
            place = place.setdefault(part, {})
        place[entry.key[-1]] = _compact(entry.value)
    return root


def _compact(value: Any) -> Any:
    """Return a tensor that keeps no more memory than its own alive: files hold whole storages."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    return plain if plain.untyped_storage().nbytes() <= plain.nbytes else plain.clone()


def _entry(name: str, value: Any, key: tuple[str | int, ...], like: Any, holders: frozenset[int]) -> StateEntry:
    """Return an entry for a value that lies as `like` does, if it has its shape."""
    if not isinstance(value, torch.Tensor):
        return StateEntry(name, value, key, None, (), holders)
    local = local_tensor_of(value)
    if _is_sharded_like(value, like):
        return StateEntry(name, local, key, tuple(global_shape(like)), tuple(chunks_in(like)), holders)
    return StateEntry(name, local, key, tuple(local.shape), tuple(chunks_of(local.shape, None)), holders)


def _has_torch_layout(saved: Mapping[str, Any]) -> bool:
    return isinstance(saved.get("state"), Mapping) and isinstance(saved.get("param_groups"), list)


def optimizer_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the model's parameters in the order in which torch's state dicts of an optimizer count them."""
    found: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for member in group["params"]:
            parameter = optimizer.model_parameter(member)
            found.setdefault(id(parameter), parameter)
    return list(found.values())


def _holders_of(model: Model, value: object) -> frozenset[int]:
    """Return the ranks that hold the same of an entry of the model's state."""
    if isinstance(value, DTensor):
        return _ranks_with_same_shard(value)
    shard = shard_of(value) if isinstance(value, torch.Tensor) else None
    divided = shard is not None and shard.is_distributed
    return _holders(_pp_ranks(model, value), state.tp_rank if divided else None)


def _state_holders(model: Model, parameter: torch.Tensor) -> frozenset[int]:
    """Return the ranks that keep the same optimizer states of a parameter."""
    zero1 = None if model.data_parallel is None else model.data_parallel.zero1
    if zero1 is not None and zero1.is_sharded(parameter):
        return frozenset({state.rank})
    return _holders_of(model, parameter)


def _ranks_with_same_shard(tensor: DTensor) -> frozenset[int]:
    """Return the ranks that hold the same part of what sharded data parallelism divides."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(
        place if placement.is_shard() else slice(None)
        for place, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return frozenset(tensor.device_mesh.mesh[index].reshape(-1).tolist())


def _pp_ranks(model: Model, value: object) -> frozenset[int]:
    """Return the pipeline ranks that hold a parameter; for other things only this rank is sure to."""
    if model.pipeline is None or not model.partitioned:
        return frozenset(range(state.pp_size))
    found: frozenset[int] = model.pipeline.holders.get(id(value), frozenset({state.pp_rank}))
    return found


def _holders(pp_ranks: frozenset[int], tp_rank: int | None) -> frozenset[int]:
    """Return the ranks on these pipeline ranks, and on this tensor-parallel rank unless all of them are meant."""
    return frozenset(_ranks_at(pp_ranks, tp_rank))


def _ranks_at(pp_ranks: frozenset[int], tp_rank: int | None) -> Iterator[int]:
    for rank in range(state.size):
        place = state.mesh.coordinates(rank)
        if place.pp in pp_ranks and tp_rank in (None, place.tp):
            yield rank
