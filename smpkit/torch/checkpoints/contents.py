"""What this rank holds of a model and its optimizer, entry by entry, and which other ranks hold the same.

From this alone each rank knows what to write: of the ranks that share a file system and hold the same, the lowest
writes it. So a weight that several ranks hold is saved once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smpkit.torch.checkpoints.places import Chunk, chunks_in, chunks_of
from smpkit.torch.checkpoints.together import Model, Optimizer
from smpkit.torch.model_state import PARTIAL_KEY
from smpkit.torch.precision import MASTER_KEY, SCALER_KEY
from smpkit.torch.sharded_tensors import local_tensor_of
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.module import global_shape
from smpkit.torch.tensor_parallel.shards import shard_of

__all__ = [
    "GROUPS",
    "MODEL",
    "SCALER",
    "STATES",
    "StateEntry",
    "model_entries",
    "nested",
    "opaque_state_name",
    "optimizer_entries",
    "optimizer_parameters",
    "parameter_names",
    "shard_positions",
]

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
