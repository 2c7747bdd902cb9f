"""Decide which pipeline rank owns which unit: cut the units, in execution order, into contiguous parts of equal cost.

The cost of a part is `w * memory + (1 - w) * compute`, each as a share of the whole model, with `w = memory_weight`.
The cut is exact: no other makes the most expensive part cheaper, and of those that make it as cheap this one is the
most even. Ties leave more to later ranks, which hold fewer microbatches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Final

from smpkit.errors import ConfigError, Problem
from smpkit.plan.partition.assignment import Assignment, UnitCost, assignment_of
from smpkit.plan.partition.cut import Cost, cut
from smpkit.units import things

_WHOLE: Final = 10**9
"""Costs are whole numbers, this many for the whole model: sums are exact, so ties are ties on every machine."""


def partition(
    units: Sequence[UnitCost], num_partitions: int, memory_weight: float, *, num_chunks: int = 1
) -> Assignment:
    """Return the best contiguous assignment of units to partitions; every partition gets at least one unit.

    With several chunks per partition (virtual stages) the units are cut into `num_chunks * num_partitions` parts, of
    which part k is on partition k mod `num_partitions`; no other cut makes the most expensive part cheaper. Ranks that
    use a shared parameter hold a copy each.

    Args:
        units: in execution order.
        memory_weight: 1 balances memory only, 0 compute only.
    """
    _require(_shortage(len(units), num_partitions, num_chunks))
    ends = cut(len(units), num_partitions * num_chunks, _range_costs(units, memory_weight))
    places = {
        index: chunk % num_partitions
        for chunk, (start, end) in enumerate(pairwise([0, *ends]))
        for index in range(start, end)
    }
    return assignment_of(units, places, num_partitions)


def assign(
    units: Sequence[UnitCost],
    num_partitions: int,
    pinned: Mapping[str, int],
    default_partition: int,
    num_chunks: int = 1,
) -> Assignment:
    """Return the assignment that a user wrote down; units that no name covers go to `default_partition`.

    With several chunks per partition, places count chunks: k is on partition k mod `num_partitions`. A partition may
    stay empty. Raises ConfigError, with every problem, if `pinned` is not valid.
    """
    pins = _resolve(units, num_partitions * num_chunks, pinned)
    places = {index: pins.get(index, default_partition) % num_partitions for index in range(len(units))}
    return assignment_of(units, places, num_partitions)


def _resolve(units: Sequence[UnitCost], num_partitions: int, pinned: Mapping[str, int]) -> dict[int, int]:
    """Return the partition of each unit that a name covers, the innermost of them."""
    known = {name for unit in units for name in _ancestors(unit.name)}
    problems: list[Problem] = []
    for name, place in pinned.items():
        if not 0 <= place < num_partitions:
            message = f"`{name}` is put on partition {place}, and there are {num_partitions}"
            problems.append(Problem((), message, f"use 0 to {num_partitions - 1}"))
        if name not in known:
            close = get_close_matches(name, sorted(known), n=1)
            hint = f"did you mean `{close[0]}`?" if close else "name a unit, or a module around units"
            problems.append(Problem((), f"no unit is called `{name}` or is below it", hint))
    _require(problems)
    covering = [[name for name in _ancestors(unit.name) if name in pinned] for unit in units]
    return {index: pinned[names[0]] for index, names in enumerate(covering) if names}


def _ancestors(name: str) -> list[str]:
    """Return a name and those of the modules around it, innermost first; the model's own is empty."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _shortage(num_units: int, num_partitions: int, num_chunks: int) -> list[Problem]:
    if num_units >= num_partitions * num_chunks:
        return []
    message = f"the model has {things(num_units, 'unit')}, too few for {things(num_partitions, 'partition')}"
    if num_units >= num_partitions:
        message += f" of {num_chunks} chunks each"
        return [Problem(("virtual_pipeline_degree",), message, "lower `virtual_pipeline_degree`")]
    hint = f"lower `pipeline_parallel_degree` to {num_units} or less"
    return [Problem(("pipeline_parallel_degree",), message, hint)]


def _require(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems, subject="partitioning")


def _range_costs(units: Sequence[UnitCost], memory_weight: float) -> Cost:
    """Return the cost of neighbouring units on one partition; it never falls when there are more of them."""
    private = [unit.parameters_bytes - sum(unit.shared.values()) + unit.activation_bytes for unit in units]
    shared = {key: num_bytes for unit in units for key, num_bytes in unit.shared.items()}
    holders = {key: [index for index, unit in enumerate(units) if key in unit.shared] for key in shared}
    total = sum(private) + sum(shared.values())
    share_of_byte = memory_weight * _WHOLE / total if total else 0.0
    # Running sums: what units from `start` to before `end` cost is a difference of two.
    compute_before = [*accumulate(_compute_shares(units, memory_weight), initial=0)]
    private_before = [*accumulate(private, initial=0)]

    def cost(start: int, end: int) -> int:
        memory = private_before[end] - private_before[start]
        for key, num_bytes in shared.items():
            if bisect_left(holders[key], start) < bisect_left(holders[key], end):
                memory += num_bytes
        return compute_before[end] - compute_before[start] + round(memory * share_of_byte)

    return cost


def _compute_shares(units: Sequence[UnitCost], memory_weight: float) -> list[int]:
    """Return the compute of each unit as a part of _WHOLE; if nothing costs anything, units count alike."""
    total = sum(unit.step_flops for unit in units)
    if total and memory_weight < 1:
        return [round((1 - memory_weight) * unit.step_flops / total * _WHOLE) for unit in units]
    has_memory = memory_weight and any(unit.parameters_bytes or unit.activation_bytes for unit in units)
    return [0 if has_memory else _WHOLE // len(units)] * len(units)
