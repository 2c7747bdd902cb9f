"""What planning needs to know of a model that is whole: its units with their costs, and its tensors by name.

What grows with the samples of a microbatch is learnt by describing a model at two sizes. A position bias or a mask that
all samples share is kept once, however many they are. With `a` bytes for the described microbatch and `b` for one of
twice the samples, the share `2 - b / a` does not grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from smpkit.plan.memory import ModelFacts, TensorFacts, UnitFacts
from smpkit.plan.partition.assignment import PER_MICROBATCH, UnitCost
from smpkit.plan.schedule.graph import Segment
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.placement.blocks import repeated_blocks
from smpkit.torch.placement.shards import shard_of


def model_facts(model: nn.Module, costs: Sequence[UnitCost], places: Mapping[str, int]) -> ModelFacts:
    """Return the facts of a model.

    Args:
        costs: of its units, as `measure_units` returns them.
        places: where the user put units, by name.
    """
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensors.setdefault(id(tensor), (name, tensor))
    names = {key: name for key, (name, _) in tensors.items()}
    units = tuple(_unit(model, cost, names) for cost in costs)
    placed = {name for unit in units for name in unit.tensors}
    return ModelFacts(
        name=type(model).__name__,
        units=units,
        tensors={name: _tensor(name, tensor) for name, tensor in tensors.values()},
        loose=tuple(name for name in names.values() if name not in placed),
        traced=any(cost.activation_bytes for cost in costs),
        places=dict(places),
        blocks=tuple(
            tuple(dict.fromkeys(names[id(param)] for param in block.parameters())) for block in repeated_blocks(model)
        ),
    )


def _unit(model: nn.Module, cost: UnitCost, names: dict[int, str]) -> UnitFacts:
    """Return a unit with the names of its tensors, in place of ids, which mean nothing in another process."""
    module = model.get_submodule(cost.name)
    held: Iterable[torch.Tensor] = [*module.parameters(), *module.buffers()]
    shared = {names[int(key)]: num_bytes for key, num_bytes in cost.shared.items()}
    return UnitFacts(replace(cost, shared=shared), tuple(dict.fromkeys(names[id(tensor)] for tensor in held)))


def _tensor(name: str, tensor: torch.Tensor) -> TensorFacts:
    shard = shard_of(tensor)
    pieces = shard.local_shapes if shard is not None and shard.is_distributed else []
    return TensorFacts(
        name=name,
        dtype=dtype_name(tensor.dtype),
        num_elements=tensor.numel(),
        num_bytes=tensor.numel() * tensor.element_size(),
        trainable=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
        rows=(tensor.shape[0] if tensor.dim() else 1) if isinstance(tensor, nn.Parameter) else 0,
        pieces=tuple(shape.numel() * tensor.element_size() for shape in pieces),
        rows_divided=shard is not None and shard.dim == 0,
        over_replicas=shard is not None and shard.sees_scaled_batch,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as descriptions have it, such as `float32`."""
    return str(dtype).removeprefix("torch.")


# ---- what grows with the samples of a microbatch, and what does not --------------------------------------------------


def twice_the_samples(inputs: Any, samples: int) -> Any:
    """Return the arguments of a microbatch with each sample twice: tensors with one row a sample are repeated."""

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor]) if tensor.shape[:1] == (samples,) else tensor

    return map_tensors(twice, inputs)


def with_growth_of_units(facts: ModelFacts, doubled: Sequence[UnitCost]) -> ModelFacts:
    """Return the facts of a model with what of its units does not grow; `doubled` costs are of twice the samples."""
    by_name = {cost.name: cost for cost in doubled}
    units = []
    for unit in facts.units:
        larger = by_name[unit.cost.name]
        shares = {name: _fixed_share(getattr(unit.cost, name), getattr(larger, name)) for name in PER_MICROBATCH}
        units.append(replace(unit, fixed={name: share for name, share in shares.items() if share}))
    return replace(facts, units=tuple(units))


def with_growth_of_values(recorded: RecordedGraph, doubled: RecordedGraph | None, samples: int) -> RecordedGraph:
    """Return a record with what of its values does not grow.

    Args:
        doubled: of a microbatch with twice the samples; None, or one that sends other values: those with a row for each
            sample grow, which a mask of all samples does not have.
    """
    if doubled is not None and _routes(doubled) == _routes(recorded):
        pairs = zip(recorded.values, doubled.values, strict=True)
        fixed = [_fixed_share(one.num_bytes, two.num_bytes) for one, two in pairs]
    else:
        fixed = [float(value.shape[:1] != (samples,)) for value in recorded.values]
    values = [replace(value, fixed=share) for value, share in zip(recorded.values, fixed, strict=True)]
    return replace(recorded, values=tuple(values))


def _routes(recorded: RecordedGraph) -> list[tuple[Segment, Segment]]:
    return [(value.source, value.target) for value in recorded.values]


def _fixed_share(once: float, twice: float) -> float:
    return min(1.0, max(0.0, 2 - twice / once)) if once else 0.0
