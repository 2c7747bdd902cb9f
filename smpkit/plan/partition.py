"""Decide which pipeline rank owns which unit: cut the units, in execution order, into contiguous parts of equal cost.

The cost of a part is `w * memory + (1 - w) * compute`, each as a share of the whole model, with `w = memory_weight`.
The cut is exact: no other makes the most expensive part cheaper, and of those that make it as cheap this one is the
most even. Ties leave more to later ranks, which hold fewer microbatches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Final, Literal

from smpkit.errors import ConfigError, Problem
from smpkit.plan.assignment import Assignment, Load, UnitCost, assignment_of, private_parameters_bytes
from smpkit.plan.chunks import even_out, partition_of_chunk
from smpkit.plan.cut import cut
from smpkit.plan.refine import Objective, refine

__all__ = ["Assignment", "Load", "Objective", "Tied", "UnitCost", "assign", "partition"]

Tied = Literal["replicate", "colocate"]

_WHOLE: Final = 10**9
"""Costs are whole numbers, this many for the whole model: sums are exact, so ties are ties on every machine."""


def partition(
    units: Sequence[UnitCost],
    num_partitions: int,
    memory_weight: float,
    *,
    pinned: Mapping[str, int] | None = None,
    tied: Tied = "replicate",
    objective: Objective | None = None,
    num_chunks: int = 1,
) -> Assignment:
    """Return the best contiguous assignment of units to partitions; every partition gets at least one unit.

    With several chunks per partition (virtual stages) the units are cut into `num_chunks * num_partitions` parts, of
    which part k is on partition k mod `num_partitions`; no other cut makes the dearest part cheaper.

    Args:
        units: in execution order.
        memory_weight: 1 balances memory only, 0 compute only.
        pinned: partitions that are given, by the name of a unit or of a module around units (the innermost wins); the
            other units are cut around them.
        tied: `replicate` ignores shared parameters, because ranks that use one each hold a copy; `colocate` puts all
            units that share one where the first of them is (SMP v1's rule), so microbatches come back there.
        objective: also improve the cut by simulating such steps.
        num_chunks: parts of a partition.

    Raises:
        ConfigError: there are fewer units than partitions, or `pinned` cannot be meant; names every problem.
    """
    _require(_basic_problems(units, num_partitions, memory_weight))
    pins = _resolve(units, num_partitions, pinned or {})
    groups = _groups(units, tied)
    given = _places(units, groups, pins)
    free = [group for group in groups if group not in given]
    held = [[index for group in given if given[group] == k for index in group] for k in range(num_partitions)]
    _require(_shortage(units, len(free), held, tied, num_chunks))
    costs = _RangeCosts(units, memory_weight, free, held)
    needs_item = [not indices for indices in held] + [True] * (num_chunks - 1) * num_partitions
    ends = cut(len(free), costs.of, needs_item)
    if num_chunks > 1:
        ends = even_out(ends, costs.of, num_partitions)
    for chunk, (start, end) in enumerate(pairwise([0, *ends])):
        held[partition_of_chunk(chunk, num_partitions)] += [index for group in free[start:end] for index in group]
    found = assignment_of(units, {index: k for k, indices in enumerate(held) for index in indices}, num_partitions)
    if objective is None:
        return found
    movable = {units[group[0]].name for group in free if len(group) == 1}
    return refine(units, found, objective, frozenset(unit.name for unit in units if unit.name not in movable))


def assign(
    units: Sequence[UnitCost],
    num_partitions: int,
    pinned: Mapping[str, int],
    default_partition: int,
    num_chunks: int = 1,
) -> Assignment:
    """Return the assignment that a user wrote down; units that no name covers go to `default_partition`.

    With several chunks per partition, places count chunks: k is on partition k mod `num_partitions`. A partition may
    stay empty. Raises ConfigError, with every problem, if `pinned` cannot be meant.
    """
    _require(_basic_problems(units, num_partitions, 0.0))
    _require(_index_problems({"default_partition": default_partition}, num_partitions * num_chunks))
    pins = _resolve(units, num_partitions * num_chunks, pinned)
    places = {i: partition_of_chunk(pins.get(i, default_partition), num_partitions) for i in range(len(units))}
    return assignment_of(units, places, num_partitions)


Group = tuple[int, ...]
"""Indices of units that go to one partition together; almost always one."""


def _groups(units: Sequence[UnitCost], tied: Tied) -> list[Group]:
    """Return the groups in the order of their first units; with `colocate`, sharing is followed through."""
    leader = list(range(len(units)))
    first_holder: dict[str, int] = {}
    for index, unit in enumerate(units):
        for key in unit.shared if tied == "colocate" else ():
            one, other = leader[first_holder.setdefault(key, index)], leader[index]
            leader = [min(one, other) if each in {one, other} else each for each in leader]
    members: dict[int, list[int]] = defaultdict(list)
    for index, first in enumerate(leader):
        members[first].append(index)
    return [tuple(members[first]) for first in sorted(members)]


def _resolve(units: Sequence[UnitCost], num_partitions: int, pinned: Mapping[str, int]) -> dict[int, int]:
    """Return the given partition of each unit that a name covers."""
    problems = _index_problems(pinned, num_partitions)
    pins: dict[int, int] = {}
    covering: set[str] = set()
    for index, unit in enumerate(units):
        names = [name for name in _ancestors(unit.name) if name in pinned]
        covering.update(names)
        if names:
            pins[index] = pinned[names[0]]
    known = sorted({name for unit in units for name in _ancestors(unit.name)})
    for name in pinned:
        if name not in covering:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "name a unit, or a module around units"
            problems.append(Problem((), f"no unit is called `{name}` or is below it", hint))
    _require(problems)
    return pins


def _ancestors(name: str) -> list[str]:
    """Return a name and those of the modules around it, innermost first; the model's own is empty."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _places(units: Sequence[UnitCost], groups: Iterable[Group], pins: Mapping[int, int]) -> dict[Group, int]:
    """Return the groups whose partition is given; a group follows the unit in it that is pinned."""
    given: dict[Group, int] = {}
    problems = []
    for group in groups:
        wanted = {pins[index]: units[index].name for index in group if index in pins}
        if len(wanted) > 1:
            text = " and ".join(f"`{name}` on partition {place}" for place, name in sorted(wanted.items()))
            problems.append(Problem((), f"units that share a parameter are pinned apart: {text}", _REPLICATE))
        elif wanted:
            given[group] = next(iter(wanted))
    _require(problems)
    return given


_REPLICATE: Final = "let every rank hold a copy of shared parameters instead of placing their units together"


def _basic_problems(units: Sequence[UnitCost], num_partitions: int, memory_weight: float) -> list[Problem]:
    problems = []
    if num_partitions < 1:
        problems.append(Problem(("pipeline_parallel_degree",), f"{num_partitions} is not a positive number"))
    if not 0 <= memory_weight <= 1:
        problems.append(Problem(("memory_weight",), f"{memory_weight} is not between 0 and 1"))
    twice = {name for name, count in Counter(unit.name for unit in units).items() if count > 1}
    return problems + [Problem((), f"two units are called `{name}`") for name in sorted(twice)]


def _index_problems(places: Mapping[str, int], num_partitions: int) -> list[Problem]:
    hint = f"use 0 to {num_partitions - 1}"
    return [
        Problem((), f"`{name}` is put on partition {place}, and there are {num_partitions}", hint)
        for name, place in places.items()
        if not 0 <= place < num_partitions
    ]


def _shortage(
    units: Sequence[UnitCost], num_free: int, held: Sequence[Sequence[int]], tied: Tied, num_chunks: int
) -> list[Problem]:
    """Return the problem that some partition, or chunk of one, would get nothing, if it would."""
    num_empty = sum(not indices for indices in held)
    if num_free >= num_empty + (num_chunks - 1) * len(held):
        return []
    if num_free >= num_empty:
        parts = f"{len(held)} partitions of {num_chunks} chunks each"
        message = f"the model has {len(units)} units, too few for {parts}"
        return [Problem(("virtual_pipeline_degree",), message, "lower `virtual_pipeline_degree`")]
    message = f"the model has {len(units)} units, too few for {len(held)} partitions"
    if len(units) >= len(held):
        message += f": {num_free} of them can be placed freely, {num_empty} partitions are still empty"
    hint = f"lower `pipeline_parallel_degree` to {len(held) - num_empty + num_free} or less"
    if tied == "colocate" and any(unit.shared for unit in units):
        hint += f", or {_REPLICATE}"
    return [Problem(("pipeline_parallel_degree",), message, hint)]


def _require(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems, subject="partitioning")


class _RangeCosts:
    """The cost of neighbouring groups on a partition, on top of what it holds already."""

    def __init__(
        self, units: Sequence[UnitCost], memory_weight: float, free: Sequence[Group], held: Sequence[Sequence[int]]
    ) -> None:
        compute = _compute_shares(units, memory_weight)
        self._compute = _running([sum(compute[i] for i in group) for group in free])
        self._private = _running([sum(_private_bytes(units[i]) for i in group) for group in free])
        self._held_compute = [sum(compute[i] for i in indices) for indices in held]
        self._held_private = [sum(_private_bytes(units[i]) for i in indices) for indices in held]
        self._held_keys = [{key for i in indices for key in units[i].shared} for indices in held]
        self._shared = {key: num_bytes for unit in units for key, num_bytes in unit.shared.items()}
        self._holders = {key: [n for n, group in enumerate(free) if _holds(units, group, key)] for key in self._shared}
        total = sum(map(_private_bytes, units)) + sum(self._shared.values())
        self._share_of_byte = memory_weight * _WHOLE / total if total else 0.0

    def of(self, partition: int, start: int, end: int) -> int:
        """Return the cost of a partition with the free groups `start` to `end`; it never falls when they get more.

        A chunk counts as its partition, so what is pinned there weighs on each of its chunks.
        """
        partition = partition_of_chunk(partition, len(self._held_compute))
        memory = self._held_private[partition] + self._private[end] - self._private[start]
        for key, num_bytes in self._shared.items():
            if key in self._held_keys[partition] or _any_between(self._holders[key], start, end):
                memory += num_bytes
        compute = self._held_compute[partition] + self._compute[end] - self._compute[start]
        return compute + round(memory * self._share_of_byte)


def _compute_shares(units: Sequence[UnitCost], memory_weight: float) -> list[int]:
    """Return the compute of each unit as a part of _WHOLE; if nothing costs anything, units count alike."""
    total = sum(unit.step_flops for unit in units)
    if total and memory_weight < 1:
        return [round((1 - memory_weight) * unit.step_flops / total * _WHOLE) for unit in units]
    has_memory = memory_weight and any(unit.parameters_bytes or unit.activation_bytes for unit in units)
    return [0 if has_memory else _WHOLE // len(units)] * len(units)


def _running(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _private_bytes(unit: UnitCost) -> int:
    return private_parameters_bytes(unit) + unit.activation_bytes


def _holds(units: Sequence[UnitCost], group: Group, key: str) -> bool:
    return any(key in units[index].shared for index in group)


def _any_between(ascending: Sequence[int], start: int, end: int) -> bool:
    place = bisect_left(ascending, start)
    return place < len(ascending) and ascending[place] < end
