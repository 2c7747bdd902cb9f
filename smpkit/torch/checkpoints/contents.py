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

from smpkit.torch.checkpoints.places import Box, boxes_of
from smpkit.torch.checkpoints.together import Model, Optimizer
from smpkit.torch.model_state import PARTIAL_KEY
from smpkit.torch.precision import MASTER_KEY, SCALER_KEY
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.shards import shard_of

__all__ = [
    "GROUPS",
    "MODEL",
    "SCALER",
    "STATES",
    "Entry",
    "is_fp16_state",
    "model_entries",
    "nested",
    "optimizer_entries",
    "optimizer_parameters",
    "optimizer_whole",
    "parameter_names",
]

MODEL: Final = "model."
STATES: Final = "optim.state."
GROUPS: Final = "optim.param_groups"
SCALER: Final = "optim.loss_scaler"


@dataclass(frozen=True)
class Entry:
    """One thing that this rank holds.

    Args:
        name: in the checkpoint, as torch's distributed checkpoints name things: `model.wte.weight`.
        value: a tensor, or something else that `torch.save` takes.
        key: where it is in the file that its kind is written to: the keys of nested dicts.
        shape: of the whole tensor; None for other things.
        boxes: what of the whole tensor it is.
        holders: the ranks that hold the same.
    """

    name: str
    value: Any
    key: tuple[str | int, ...]
    shape: tuple[int, ...] | None
    boxes: tuple[Box, ...]
    holders: frozenset[int]


def model_entries(model: Model) -> list[Entry]:
    """Return what this rank holds of a model's state dict, tied weights under each of their names."""
    found = []
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and not model.holds(value):
            continue
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            continue
        shard = shard_of(value) if isinstance(value, torch.Tensor) else None
        holders = _holders(_pp_ranks(model, value), None if shard is None or shard.dim is None else state.tp_rank)
        found.append(_entry(f"{MODEL}{name}", value, (name,), value, holders))
    return found


def optimizer_entries(optimizer: Optimizer, model: Model) -> list[Entry]:
    """Return what this rank holds of an optimizer's state.

    States are named by their parameter, because its number depends on the parameter groups. A state of its parameter's
    shape is divided as the parameter is; any other one of a divided parameter is for this very division only.
    """
    saved = optimizer.local_state_dict(gather_if_shard=False)
    del saved[PARTIAL_KEY]
    if not _is_torchs(saved):
        return [Entry(optimizer_whole(), saved, (), None, (), _holders(frozenset({state.pp_rank}), state.tp_rank))]
    parameters, names = optimizer_parameters(optimizer), parameter_names(optimizer, model)
    everywhere = _holders(frozenset(range(state.pp_size)), None)
    found = [Entry(GROUPS, saved["param_groups"], ("param_groups",), None, (), everywhere)]
    if SCALER_KEY in saved:
        found.append(Entry(SCALER, saved[SCALER_KEY], (SCALER_KEY,), None, (), everywhere))
    for index, states in saved["state"].items():
        parameter, name = parameters[index], names[index]
        if not model.holds(parameter):
            continue
        shard = shard_of(parameter)
        divided = shard is not None and shard.dim is not None
        holders = _holders(_pp_ranks(model, parameter), state.tp_rank if divided else None)
        for key, value in states.items():
            full = f"{STATES}{_state_name(name, key, value, parameter)}"
            found.append(_entry(full, value, ("state", index, key), parameter, holders))
    return found


def is_fp16_state(entry: Entry) -> bool:
    """Tell whether an entry of an optimizer's state is there for `fp16` or `bf16`: SMP v1 had a file for these."""
    return entry.key == (SCALER_KEY,) or (len(entry.key) == 3 and entry.key[2] == MASTER_KEY)


def parameter_names(optimizer: Optimizer, model: Model) -> list[str]:
    """Return the name of each parameter of an optimizer, in the order of torch's state dicts."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    return [names.get(id(parameter), f"#{index}") for index, parameter in enumerate(optimizer_parameters(optimizer))]


def optimizer_whole() -> str:
    """Return the name of an optimizer's state that is not torch's: nobody knows how to divide it otherwise."""
    return _here_only("optim.whole", (state.pp_rank, state.pp_size), (state.tp_rank, state.tp_size))


def _state_name(name: str, key: object, value: object, parameter: torch.Tensor) -> str:
    shard = shard_of(parameter)
    shared = not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == parameter.shape
    if shard is None or shard.dim is None or shared:
        return f"{name}.{key}"
    return _here_only(f"{name}.{key}", (shard.tp_rank, shard.tp_size))


def _here_only(name: str, *places: tuple[int, int]) -> str:
    """Return the name of what only a rank at these places (which of how many) can use."""
    return name + "".join(f"@{index}of{size}" for index, size in places)


def nested(entries: Iterable[Entry]) -> dict[Any, Any]:
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


def _entry(name: str, value: Any, key: tuple[str | int, ...], like: Any, holders: frozenset[int]) -> Entry:
    """Return an entry for a value that lies as `like` does, if it has its shape."""
    if not isinstance(value, torch.Tensor):
        return Entry(name, value, key, None, (), holders)
    shard = shard_of(like) if value.shape == like.shape else None
    shape = tuple(value.shape) if shard is None else shard.shape
    return Entry(name, value, key, shape, tuple(boxes_of(value.shape, shard)), holders)


def _is_torchs(saved: Mapping[str, Any]) -> bool:
    return isinstance(saved.get("state"), Mapping) and isinstance(saved.get("param_groups"), list)


def optimizer_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the model's parameters in the order in which torch's state dicts of an optimizer count them."""
    found: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in map(optimizer.model_parameter, group["params"]):
            found.setdefault(id(parameter), parameter)
    return list(found.values())


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
