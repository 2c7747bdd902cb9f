"""What planning needs to know of a model that is whole: its units with their costs, and its tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from smpkit.plan.memory import ModelFacts, TensorFacts, UnitFacts
from smpkit.plan.mesh import CommGroup
from smpkit.plan.partition.assignment import UnitCost
from smpkit.torch.placement.blocks import repeated_blocks
from smpkit.torch.placement.shards import TpShard, shard_of


def model_facts(model: nn.Module, costs: Sequence[UnitCost], places: Mapping[str, int]) -> ModelFacts:
    """Return the facts of a model.

    Args:
        costs: of its units, as `measure_units` returns them.
        places: where the user put units, by name.
    """
    names = _first_names(model)
    units = tuple(_unit(model, cost, names) for cost in costs)
    placed = {name for unit in units for name in unit.tensors}
    return ModelFacts(
        name=type(model).__name__,
        units=units,
        tensors={name: _tensor(name, tensor) for name, tensor in _tensors(model) if name == names[id(tensor)]},
        loose=tuple(name for name in dict.fromkeys(names.values()) if name not in placed),
        traced=any(cost.activation_bytes for cost in costs),
        places=dict(places),
        blocks=tuple(
            tuple(dict.fromkeys(names[id(each)] for each in block.parameters())) for block in repeated_blocks(model)
        ),
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _first_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter and buffer by its id, the first one of tied ones."""
    names: dict[int, str] = {}
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), name)
    return names


def _unit(model: nn.Module, cost: UnitCost, names: dict[int, str]) -> UnitFacts:
    """Return a unit with the names of its tensors, in place of ids, which mean nothing in another process."""
    module = model.get_submodule(cost.name)
    held: Iterable[torch.Tensor] = [*module.parameters(), *module.buffers()]
    shared = {names[int(key)]: num_bytes for key, num_bytes in cost.shared.items()}
    return UnitFacts(replace(cost, shared=shared), tuple(dict.fromkeys(names[id(each)] for each in held)))


def _tensor(name: str, tensor: torch.Tensor) -> TensorFacts:
    shard = shard_of(tensor)
    return TensorFacts(
        name=name,
        dtype=dtype_name(tensor.dtype),
        num_elements=tensor.numel(),
        num_bytes=tensor.numel() * tensor.element_size(),
        trainable=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
        rows=(tensor.shape[0] if tensor.dim() else 1) if isinstance(tensor, nn.Parameter) else 0,
        pieces=_pieces(tensor, shard),
        rows_divided=shard is not None and shard.dim == 0,
        over_replicas=shard is not None and shard.group is CommGroup.RDP_GROUP,
    )


def _pieces(tensor: torch.Tensor, shard: TpShard | None) -> tuple[int, ...]:
    if shard is None or not shard.is_distributed:
        return ()
    shapes = [torch.Size(replace(shard, tp_rank=rank).local_shape) for rank in range(shard.tp_size)]
    return tuple(shape.numel() * tensor.element_size() for shape in shapes)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as descriptions have it, such as `float32`."""
    return str(dtype).removeprefix("torch.")
