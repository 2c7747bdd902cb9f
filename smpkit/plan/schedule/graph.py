"""What one microbatch asks of every pipeline rank: its segments, and the values that travel between them.

A chain has one segment per rank. A rank has several when a microbatch comes back to it (a tied head on rank 0, an
encoder-decoder, a U-Net), and none when it owns nothing that this step function calls. The same graph serves every
microbatch of a step::

    chain          rank 0 ──► rank 1 ──► rank 2
    tied head      (0, 0) ──► (1, 0) ──► (2, 0) ──► (0, 1)

Backward runs along the differentiable transfers, against their direction. On its own rank a microbatch goes through
its segments in order, and back through them in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from smpkit.errors import SmpkitError


class ScheduleError(SmpkitError, AssertionError):
    """A graph or schedule that no executor could run: a bug in smpkit, or an edited plan file."""

    exit_code = 3


class Kind(StrEnum):
    """What an action does with its segment."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward, or, in a schedule with WEIGHT actions, the half that makes the inputs' gradients."""
    WEIGHT = "W"
    """The half of a split backward that makes the parameters' gradients; no rank waits for it (zero bubble)."""


@dataclass(frozen=True, order=True)
class Segment:
    """What one rank runs of one microbatch between two receives."""

    rank: int
    """pp_rank."""
    index: int
    """0, 1, ... in the order in which this rank runs them in forward."""

    def __str__(self) -> str:
        return f"rank {self.rank} segment {self.index}"


@dataclass(frozen=True, order=True)
class Transfer:
    """A value that one segment needs from another; between segments of one rank it is kept, not sent."""

    source: Segment
    target: Segment
    num_bytes: int = 0
    differentiable: bool = True
    """False: no gradient travels back."""

    @property
    def is_message(self) -> bool:
        """Whether the value travels between ranks."""
        return self.source.rank != self.target.rank


@dataclass(frozen=True)
class Need:
    """One thing that must have happened, in the same microbatch, before an action can run."""

    kind: Kind
    segment: Segment
    transfer: Transfer | None = None
    """The value that arrives by it, if it travels between ranks."""


@dataclass(frozen=True)
class SegmentGraph:
    """The segments of one microbatch; raises ScheduleError if they wait for each other in a circle.

    Args:
        segments: in any order; the indices of one rank are 0, 1, ... without gaps.
        transfers: at most one message per value and destination; their order is the order of sending.
        has_backward: False for a step that only evaluates.
    """

    num_ranks: int
    segments: tuple[Segment, ...]
    transfers: tuple[Transfer, ...] = ()
    has_backward: bool = True

    def __post_init__(self) -> None:
        _ = self.topological  # raises where the graph has a circle

    @classmethod
    def chain(cls, num_ranks: int, has_backward: bool = True) -> SegmentGraph:
        """Make the common case: every rank once, each handing a value to the next."""
        return cls.loop(num_ranks, 1, has_backward)

    @classmethod
    def loop(cls, num_ranks: int, num_chunks: int, has_backward: bool = True) -> SegmentGraph:
        """Make a chain that goes round all ranks `num_chunks` times (interleaved virtual stages)."""
        visits = [Segment(rank, chunk) for chunk in range(num_chunks) for rank in range(num_ranks)]
        return cls.path(visits, has_backward)

    @classmethod
    def path(cls, segments: Sequence[Segment], has_backward: bool = True) -> SegmentGraph:
        """Make the graph in which each segment hands one value to the next."""
        transfers = tuple(Transfer(source, target) for source, target in pairwise(segments))
        num_ranks = max((segment.rank for segment in segments), default=-1) + 1
        return cls(num_ranks, tuple(segments), transfers, has_backward)

    @classmethod
    def of(cls, counts: Sequence[int], messages: Iterable[Transfer], has_backward: bool) -> SegmentGraph:
        """Make the graph of what was recorded.

        Args:
            counts: how many segments each rank has.
            messages: the values that travel between ranks, in the order of sending.
        """
        segments = [Segment(rank, index) for rank, count in enumerate(counts) for index in range(count)]
        # What a rank keeps from one of its segments to the next travels nowhere, but orders them.
        kept = [Transfer(Segment(segment.rank, segment.index - 1), segment) for segment in segments if segment.index]
        return cls(len(counts), tuple(segments), (*messages, *kept), has_backward)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """By rank, how many segments it has."""
        ranks = [segment.rank for segment in self.segments]
        return tuple(ranks.count(rank) for rank in range(self.num_ranks))

    @cached_property
    def topological(self) -> tuple[Segment, ...]:
        """All segments, each after everything it needs; the same on every rank and in every process."""
        # Sorted, because the order of a set of segments is not the same in every process.
        before = {segment: sorted(set(self._before(segment))) for segment in sorted(self.segments)}
        sorter = TopologicalSorter(before)
        try:
            return tuple(sorter.static_order())
        except CycleError as error:
            cycle = " -> ".join(f"({segment})" for segment in error.args[1])
            raise ScheduleError(f"the segments wait for each other in a circle: {cycle}") from None

    @cached_property
    def outgoing(self) -> dict[Segment, tuple[Transfer, ...]]:
        """The transfers that leave each segment, in the order of sending."""
        return self._transfers_by(lambda transfer: transfer.source)

    @cached_property
    def incoming(self) -> dict[Segment, tuple[Transfer, ...]]:
        """The transfers that reach each segment."""
        return self._transfers_by(lambda transfer: transfer.target)

    def _transfers_by(self, end: Callable[[Transfer], Segment]) -> dict[Segment, tuple[Transfer, ...]]:
        by_segment: dict[Segment, list[Transfer]] = {segment: [] for segment in self.segments}
        for transfer in self.transfers:
            by_segment[end(transfer)].append(transfer)
        return {segment: tuple(transfers) for segment, transfers in by_segment.items()}

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each rank the segments on the longest way from its first one to the end; `P - rank` in a chain."""
        length: dict[Segment, int] = {}
        for segment in reversed(self.topological):
            length[segment] = max(length.get(segment, 0), 1)
            for before in self._before(segment):
                length[before] = max(length.get(before, 0), length[segment] + 1)
        return tuple(length.get(Segment(rank, 0), 0) for rank in range(self.num_ranks))

    @cached_property
    def is_chain(self) -> bool:
        """Whether each rank has one segment, and hands values to the next rank alone, as in `chain`."""
        steps = [(transfer.source, transfer.target) for transfer in self.transfers]
        ranks = [Segment(rank, 0) for rank in range(self.num_ranks)]
        return self.has_backward and list(self.segments) == ranks and steps == list(pairwise(ranks))

    @cached_property
    def loop_chunks(self) -> int:
        """How often the graph goes round all ranks if it is a loop, else 0; a chain is a loop of one.

        Values may also skip ahead (a residual, or what a rank keeps for its next chunk).
        """
        chunks = self.counts[0] if self.counts else 0
        if not chunks or len(self.segments) != chunks * self.num_ranks:
            return 0
        hops = set[int]()
        for transfer in self.transfers:
            source = transfer.source.index * self.num_ranks + transfer.source.rank
            target = transfer.target.index * self.num_ranks + transfer.target.rank
            if source >= target:
                return 0
            if target == source + 1 and (transfer.differentiable or not self.has_backward):
                hops.add(source)
        return chunks if len(hops) == len(self.segments) - 1 else 0

    def splits(self, segment: Segment) -> bool:
        """Whether splitting the segment's backward can save time: it sends a gradient that others wait for."""
        return self.has_backward and any(transfer.differentiable for transfer in self.incoming[segment])

    def kinds(self, segment: Segment, split_backward: bool = False) -> tuple[Kind, ...]:
        if not self.has_backward:
            return (Kind.FORWARD,)
        split = split_backward and self.splits(segment)
        return (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT) if split else (Kind.FORWARD, Kind.BACKWARD)

    def needs(self, kind: Kind, segment: Segment) -> tuple[Need, ...]:
        """Return what an action waits for; a value that travels is one need of its own."""
        if kind is Kind.WEIGHT:
            return (Need(Kind.BACKWARD, segment),)
        return tuple(self._forward_needs(segment) if kind is Kind.FORWARD else self._backward_needs(segment))

    def _forward_needs(self, segment: Segment) -> Iterator[Need]:
        if segment.index:
            yield Need(Kind.FORWARD, Segment(segment.rank, segment.index - 1))
        for transfer in self.incoming[segment]:
            yield Need(Kind.FORWARD, transfer.source, transfer if transfer.is_message else None)

    def _backward_needs(self, segment: Segment) -> Iterator[Need]:
        # `model.backward` is called in a rank's last segment at the earliest, so no backward comes before that one.
        if segment.index == self.counts[segment.rank] - 1:
            yield Need(Kind.FORWARD, segment)
        else:
            yield Need(Kind.BACKWARD, Segment(segment.rank, segment.index + 1))
        for transfer in self.outgoing[segment]:
            if transfer.differentiable:
                yield Need(Kind.BACKWARD, transfer.target, transfer if transfer.is_message else None)

    def _before(self, segment: Segment) -> list[Segment]:
        return [need.segment for need in self._forward_needs(segment)]
