"""What grows with the samples of a microbatch, and what does not: learnt by describing a model at two sizes.

A position bias or a mask that all samples share is kept once, however many they are. With `a` bytes for the described
microbatch and `b` for one of twice the samples, the share `2 - b / a` does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from smpkit.plan.memory import ModelFacts
from smpkit.plan.partition.assignment import PER_MICROBATCH, UnitCost
from smpkit.plan.schedule.graph import Segment
from smpkit.plan.schedule.recorded_graph import RecordedGraph
from smpkit.torch.core.tensor_spec import map_tensors


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
    if doubled is not None and _ways(doubled) == _ways(recorded):
        pairs = zip(recorded.values, doubled.values, strict=True)
        fixed = [_fixed_share(one.num_bytes, two.num_bytes) for one, two in pairs]
    else:
        fixed = [float(each.shape[:1] != (samples,)) for each in recorded.values]
    values = [replace(each, fixed=share) for each, share in zip(recorded.values, fixed, strict=True)]
    return replace(recorded, values=tuple(values))


def _ways(recorded: RecordedGraph) -> list[tuple[Segment, Segment]]:
    return [(each.source, each.target) for each in recorded.values]


def _fixed_share(once: float, twice: float) -> float:
    return min(1.0, max(0.0, 2 - twice / once)) if once else 0.0
