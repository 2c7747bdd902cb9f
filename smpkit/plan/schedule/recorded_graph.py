"""The segment graph of an assignment as the model's own code makes it, recorded on tensors without data.

Where nothing was recorded, `linear_graph.py` guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smpkit.plan.partition.assignment import Assignment, UnitCost
from smpkit.plan.schedule.graph import Segment, SegmentGraph, Transfer

__all__ = ["RecordedGraph", "SentValue"]


@dataclass(frozen=True)
class SentValue:
    """A value that one microbatch sends from a rank to another."""

    source: Segment
    target: Segment
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    differentiable: bool
    """Whether its gradient, of as many bytes, travels back."""
    consumer: str
    """The module or operation that needs it."""


@dataclass(frozen=True)
class RecordedGraph:
    """What one microbatch runs and sends under one assignment."""

    units: tuple[tuple[str, int], ...]
    """The assignment: name and rank of each unit, in execution order."""
    segments: tuple[tuple[Segment, tuple[str, ...]], ...]
    """The segments by rank, each with the units that it calls, in order; a unit that it calls twice is there twice."""
    values: tuple[SentValue, ...]
    """In the order of sending."""

    def fits(self, assignment: Assignment) -> bool:
        """Return whether it was recorded under this assignment."""
        return self.units == assignment.units

    def graph(self, num_ranks: int, has_backward: bool) -> SegmentGraph:
        """Return the graph that a schedule is made for."""
        counts = Counter(segment.rank for segment, _ in self.segments)
        messages = [
            Transfer(value.source, value.target, value.num_bytes, value.differentiable and has_backward)
            for value in self.values
        ]
        return SegmentGraph.of([counts[rank] for rank in range(num_ranks)], messages, has_backward)

    def runs(self, costs: Sequence[UnitCost]) -> dict[Segment, list[UnitCost]]:
        """Return the units of each segment; of one that is called several times, each call has its part of the costs.

        Units that the recorded microbatch has not called count in their rank's first segment.
        """
        of_unit = {cost.name: cost for cost in costs}
        num_calls = Counter(name for _, names in self.segments for name in names)
        runs = {segment: [_share(of_unit[name], num_calls[name]) for name in names] for segment, names in self.segments}
        for name, rank in self.units:
            if not num_calls[name]:
                runs[Segment(rank, 0)].append(of_unit[name])
        return runs

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> RecordedGraph:
        """Read what `dataclasses.asdict` has made of one, after it has been JSON."""
        return cls(
            tuple((str(name), int(rank)) for name, rank in content["units"]),
            tuple((Segment(**segment), tuple(names)) for segment, names in content["segments"]),
            tuple(
                SentValue(
                    **{
                        **each,
                        "source": Segment(**each["source"]),
                        "target": Segment(**each["target"]),
                        "shape": tuple(each["shape"]),
                    }
                )
                for each in content["values"]
            ),
        )


def _share(cost: UnitCost, num_calls: int) -> UnitCost:
    if num_calls == 1:
        return cost
    return replace(
        cost,
        flops=cost.flops / num_calls,
        activation_bytes=cost.activation_bytes // num_calls,
        boundary_bytes=cost.boundary_bytes // num_calls,
        recomputed_flops=cost.recomputed_flops / num_calls,
        operations=cost.operations // num_calls,
        moved_bytes=cost.moved_bytes // num_calls,
        spared_bytes=cost.spared_bytes // num_calls,
        postponed_bytes=cost.postponed_bytes // num_calls,
        weight_products=cost.weight_products // num_calls,
    )
