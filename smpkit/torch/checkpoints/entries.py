"""What this rank holds of a model and its optimizer, entry by entry, and which other ranks hold the same.

From its entries alone each rank knows what to write (`writers_of`), so a weight that several ranks hold is saved once,
and by each of them about as many bytes. Where a local tensor lies in the whole model's is described by `Chunk`s, those
of torch's distributed checkpoints.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smpkit.errors import CheckpointError, UsageError
from smpkit.torch.checkpoints.tensors import is_storable
from smpkit.torch.core.runtime import WrappedOptimizer, state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.model import DistributedModel
from smpkit.torch.placement.dtensor import local_tensor_of
from smpkit.torch.placement.shards import TpShard, shard_of, shard_range
from smpkit.torch.precision.cast import SCALER_KEY, half_dtype
from smpkit.torch.state_dict import MARKS
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.registry import Translation, tensor_of

TensorFactory = Callable[[], torch.Tensor]
"""Makes a whole tensor when it is called."""

MAX_WRITERS: Final = 8
"""Of what many replicas hold: each of them will open the files of all writers when it resumes."""
MODEL: Final = "model."
STATES: Final = "optim.state."
GROUPS: Final = "optim.param_groups"
SCALER: Final = "optim.loss_scaler"


def wrapped_model(model: DistributedModel | None = None) -> DistributedModel:
    """Return `model`, or the last model that was wrapped if it is None; raise UsageError if there is none."""
    wrapped: Any = model if model is not None else state.model
    if wrapped is None:
        raise UsageError("there is no model to save or load", hint="wrap it with smp.DistributedModel(...) first")
    return wrapped  # type: ignore[no-any-return]


def degrees() -> dict[str, int]:
    """Return the degrees of this job, as checkpoints name them."""
    return {
        "pipeline": state.pp_size,
        "tensor": state.tp_size,
        "virtual pipeline": state.cfg.virtual_pipeline_degree,
    }


def precision() -> str:
    """Return which weights have float32 masters beside them in this job; `float32` if none have."""
    half = half_dtype(state.cfg)
    # With sharded data parallelism a rank's part of a weight is float32 itself.
    without = half is None or state.cfg.sharded_data_parallel_degree > 1
    return "float32" if without else str(half).removeprefix("torch.")


@dataclass(frozen=True)
class StateEntry:
    """One tensor or value that this rank holds.

    Args:
        name: in the checkpoint, in the style of torch's distributed checkpoints: `model.wte.weight`.
        shape: of the whole tensor; None for other values, and for tensors that a file of safetensors cannot hold.
        chunks: the parts of the whole tensor that `value` is.
        holders: the ranks that hold the same.
        is_replicated: whether all holders have the same values. Of running statistics each replica has its own between
            two steps, and those of the first go on.
    """

    name: str
    value: Any
    shape: tuple[int, ...] | None
    chunks: tuple[Chunk, ...]
    holders: frozenset[int]
    is_replicated: bool = True

    def writers(self, here: Collection[int]) -> frozenset[int]:
        """Return the ranks that may write it, of those that share a file system."""
        ranks = self.holders.intersection(here)
        return ranks if self.is_replicated else frozenset(sorted(ranks)[:1])

    @property
    def num_bytes(self) -> int:
        """Of its tensor; 0 for other values."""
        return 0 if self.shape is None else int(self.value.nbytes)

    @property
    def name_in_file(self) -> str:
        """The name of a tensor in its file: the model's own, or the state's."""
        return self.name.removeprefix(MODEL if self.name.startswith(MODEL) else STATES)


@torch.no_grad()  # or each look at a DTensor's local part is a function of autograd
def entries_of(model: DistributedModel, optimizer: WrappedOptimizer | None) -> list[StateEntry]:
    """Return this rank's entries: a model's state dict, tied weights under each of their names, and optimizer states.

    States are named by their parameter, because its number depends on the parameter groups. A state with its
    parameter's shape is divided as the parameter is. Any other state of a divided parameter can be loaded only with the
    same division, and its name says which.
    """
    entries, divisions = [], dict[int, Division]()
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            if not model.holds(value):
                continue
        elif model.placement.running_pp_rank_of(name.rpartition(".")[0]) not in (None, state.pp_rank):
            continue  # only the rank that runs its module changes it
        if isinstance(value, torch.Tensor):
            if value.device.type == "meta":
                continue  # without memory yet, so without a value
            divisions.setdefault(id(value), division_of(value))
        entry = _entry(f"{MODEL}{name}", value, divisions.get(id(value)), model.placement.of(value).holders)
        entries.append(replace(entry, is_replicated=isinstance(value, nn.Parameter)))
    if optimizer is None:
        return entries
    saved = optimizer.local_state_dict(gather_if_shard=False)
    others = saved.keys() - {"state", "param_groups", SCALER_KEY, *MARKS}
    if others or not isinstance(saved.get("state"), Mapping) or not isinstance(saved.get("param_groups"), list):
        more = "".join(f", but `{name}` too" for name in sorted(others)[:1])
        raise CheckpointError(
            f"the state of {type(optimizer.optimizer).__name__} has not the layout of torch's optimizers, `state` and"
            f" `param_groups`{more}",
            hint="wrap an optimizer that keeps all in these two, or save with smp.save(optimizer.state_dict(), ...)",
        )
    members = members_of(optimizer, model)
    names, parameters = [*members], [*members.values()]
    _warn_of_values_beyond_model(model, parameters)
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    everywhere = frozenset(range(state.size))
    entries.append(StateEntry(GROUPS, groups, None, (), everywhere))
    if SCALER_KEY in saved:
        entries.append(StateEntry(SCALER, saved[SCALER_KEY], None, (), everywhere))
    for index, states in saved["state"].items():
        parameter = parameters[index]
        if not model.owns(parameter):
            continue
        holders, division = model.placement.of(parameter).state_holders, divisions.get(id(parameter))
        division = division or division_of(parameter)
        for key, value in states.items():
            is_whole = not isinstance(value, torch.Tensor) or value.dim() == 0 or division.fits(value)
            full = f"{STATES}{names[index]}.{key}{'' if is_whole else division.suffix}"
            entries.append(_entry(full, value, division, holders))
    return entries


def _warn_of_values_beyond_model(model: DistributedModel, parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        if parameter.requires_grad and parameter not in model.placement:
            warn_user(
                f"the optimizer trains a parameter of shape {list(parameter.shape)} that is not in the model: a"
                " checkpoint has its states, but not its value, so keep that in `user_content`, or wrap one module that"
                " has both"
            )
            return


def _entry(name: str, value: Any, division: Division | None, holders: frozenset[int]) -> StateEntry:
    """Return an entry for a value, divided like its parameter if it has the shape of that."""
    if not isinstance(value, torch.Tensor):
        return StateEntry(name, value, None, (), holders)
    if division is not None and not division.fits(value):
        division = None
    local = local_tensor_of(value).detach().resolve_conj().resolve_neg()
    if not is_storable(local):
        if division is not None and division.suffix:
            raise CheckpointError(f"`{name}` is divided over ranks, and of a kind that cannot be: {local.dtype}")
        return StateEntry(name, local, None, (), holders)
    if division is not None:
        return StateEntry(name, local, division.shape, division.chunks, holders)
    return StateEntry(name, local, tuple(local.shape), tuple(chunks_of(local.shape)), holders)


def members_of(optimizer: WrappedOptimizer, model: DistributedModel) -> dict[str, torch.Tensor]:
    """Return the parameters of an optimizer by name, in the order in which torch's state dicts count them."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    members = [optimizer.model_parameter(member) for group in optimizer.param_groups for member in group["params"]]
    unique = {id(parameter): parameter for parameter in members}.values()
    return {names.get(id(parameter), f"#{number}"): parameter for number, parameter in enumerate(unique)}


def writers_of(items: Iterable[tuple[str, int, frozenset[int]]]) -> dict[str, int]:
    """Return by name which of the ranks that may write an item does so; nothing of one that none may write.

    Ranks that hold the same items divide them among `MAX_WRITERS` of them. All come to the same answer for these,
    whatever else they hold, without a message.

    Args:
        items: name, bytes, and the ranks that may write it.
    """
    shared: dict[frozenset[int], list[tuple[str, int]]] = {}
    for name, size, ranks in items:
        shared.setdefault(ranks, []).append((name, size))
    writers = dict[str, int]()
    for ranks, sizes in shared.items():
        step = -(-len(ranks) // MAX_WRITERS)
        writers |= shares_of(sizes, sorted(ranks)[::step]) if ranks else {}
    return writers


def shares_of(sizes: Iterable[tuple[str, int]], ranks: Iterable[int]) -> dict[str, int]:
    """Return by name which of the ranks takes an item of so many bytes: each gets about as many as the others."""
    taken = [(0, rank) for rank in ranks]  # a heap: whoever has least so far is first
    shares = dict[str, int]()
    for name, size in sorted(sizes, key=lambda item: (-item[1], item[0])):
        so_far, shares[name] = taken[0]
        heapq.heapreplace(taken, (so_far + size, shares[name]))
    return shares


@dataclass(frozen=True)
class Chunk:
    """A part of a whole tensor that a local one holds.

    A whole tensor is one chunk. A tensor-parallel piece is one chunk, too, unless several matrices are packed into it:
    of a fused query-key-value weight, each of two ranks has three chunks::

        whole  | q q' | k k' | v v' |        rank 0 has q, k and v, side by side: | q | k | v |

    Args:
        offsets: of its first element in the whole tensor, by dimension.
        sizes: by dimension.
        local_start: offsets of its first element in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_start: tuple[int, ...]


def chunks_of(shape: Sequence[int], shard: TpShard | None = None) -> list[Chunk]:
    """Return the chunks of a local tensor of `shape`, divided as `shard` says; None: it is the whole tensor."""
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


@dataclass(frozen=True)
class Division:
    """How a parameter or buffer is divided over ranks, and with it each state of its shape."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    local_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    suffix: str
    """In names, which part it is, out of how many: `@0of2`; empty if it is whole."""

    def fits(self, value: torch.Tensor) -> bool:
        """Return whether a state is divided as its parameter is."""
        return tuple(local_tensor_of(value).shape) == self.local_shape


@torch.no_grad()
def division_of(tensor: torch.Tensor) -> Division:
    """Return how a tensor is divided: by tensor parallelism, and what is left to this rank by a DTensor."""
    shard = shard_of(tensor)
    chunks, suffix = chunks_of(tensor.shape, shard), ""
    if shard is not None and shard.is_distributed:
        suffix = f"@{shard.tp_rank}of{shard.tp_size}"
    if isinstance(tensor, DTensor):
        clipped = [_clipped(chunk, *part) for part in _parts_of(tensor) for chunk in chunks]
        chunks = [chunk for chunk in clipped if 0 not in chunk.sizes]
        suffix += f"@{state.rank}of{state.size}"
    return Division(tuple(global_shape(tensor)), tuple(local_tensor_of(tensor).shape), tuple(chunks), suffix)


_parts: dict[object, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
state.reset_hooks.append(_parts.clear)


def _parts_of(tensor: DTensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of the parts that this rank has, computed once for all that are divided alike."""
    key = tensor.shape, tensor.device_mesh, tensor.placements
    if key not in _parts:
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        _parts[key] = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    return _parts[key]


def _clipped(chunk: Chunk, start: Sequence[int], sizes: Sequence[int]) -> Chunk:
    """Return the intersection of a chunk with a part of the local tensor; local offsets then count in that part."""
    dims = range(len(start))
    first = [max(chunk.local_start[dim], start[dim]) for dim in dims]
    end = [min(chunk.local_start[dim] + chunk.sizes[dim], start[dim] + sizes[dim]) for dim in dims]
    return Chunk(
        tuple(chunk.offsets[dim] + first[dim] - chunk.local_start[dim] for dim in dims),
        tuple(max(end[dim] - first[dim], 0) for dim in dims),
        tuple(first[dim] - start[dim] for dim in dims),
    )


def copy_chunks(local: torch.Tensor, whole: torch.Tensor, chunks: Iterable[Chunk]) -> None:
    """Copy chunks of a whole tensor to a local one."""
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


class TensorsOnAccess(Mapping[str, torch.Tensor]):
    """Whole tensors, made on access; the last is kept, because a translation may take its parts one by one."""

    def __init__(self, names: Collection[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names = names
        self._make = make
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # free the old tensor before making the new one
            self._last = name, self._make(name)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def translated(
    translation: Translation, values: Mapping[str, torch.Tensor], module: nn.Module, prefix: str
) -> Iterator[tuple[str, TensorFactory]]:
    """Yield the names of a module's translated state, after `prefix`, each with what makes the whole tensor."""
    for name, value in translation(values, module):
        yield prefix + name, functools.partial(tensor_of, value)
