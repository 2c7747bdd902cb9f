"""Plan a step again once it is known what its actions and messages take.

The first schedule follows from the graph alone. After the second step, every rank tells pp_rank 0 the median time that
its segments computed and how fast the link to the next rank is. pp_rank 0 plans with these costs and tells everyone
the schedule, so it is the same everywhere: a slow link is hidden by holding more microbatches, as far as
`active_microbatches` allows. The order in which a rank accumulates gradients, ascending microbatches, stays. Pipelines
that tensor parallelism joins follow the first of them.

What is predicted need not come true: more live microbatches need more memory, caches and cores. So the new schedule and
the one before run in turns for some steps, and pp_rank 0, which is the first to begin and the last to end a step, tells
everyone which of them was faster.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Final, Generic, TypeVar

import torch

from smpkit.plan.schedule.actions import Costs, Schedule, from_json, to_json
from smpkit.plan.schedule.checker import check
from smpkit.plan.schedule.graph import Kind, Segment, SegmentGraph
from smpkit.plan.schedule.simulate import simulate
from smpkit.torch.core.tensor_spec import spec_of
from smpkit.torch.pipeline.message_order import TRANSFERS_PER_MICROBATCH, P2PTransfer
from smpkit.torch.pipeline.messages import Tag
from smpkit.torch.pipeline.stage_context import StageContext

__all__ = ["Meter", "Trial", "replan"]

T = TypeVar("T")

_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
_MIN_GAIN: Final = 0.002
"""Another schedule must be predicted to be faster by this share. Small, because depth also absorbs jitter, which the
prediction knows nothing of, and `active_microbatches` has granted the memory."""
_MIN_LATENCY_SHARE: Final = 0.01
"""A message counts as at least this share of the longest action late. What a ping takes is less than what lies between
two ranks' actions: Python of both, other processes on their cores, and no two actions take the same time. Without any
slack, as in 1F1B, each rank waits for all of it with each microbatch."""
_NUM_TRIED: Final = 2
"""Steps that each schedule runs, the one before its measured step included; the fastest counts."""
_MAX_SLOWDOWN: Final = 0.03
"""By so much slower than the schedule before, measured, the new one is not kept."""
_NUM_PINGS: Final = 5
_PING: Final = TRANSFERS_PER_MICROBATCH - 1
"""The number of a transfer that no microbatch makes."""
_NS_PER_SECOND: Final = 1e9
_WHAT: Final = "the measured times of a step"


class Meter:
    """Collects how long this rank's actions computed, without their waits for messages."""

    def __init__(self) -> None:
        self._spent_ns: defaultdict[tuple[Kind, int], list[int]] = defaultdict(list)

    def note(self, kind: Kind, segment: int, spent_ns: int) -> None:
        """Add one action."""
        self._spent_ns[kind, segment].append(spent_ns)

    def seconds(self, num_segments: int) -> list[float]:
        """Return the median time of each kind of action, by segment."""
        spent = [self._spent_ns.get((kind, segment), [0]) for segment in range(num_segments) for kind in _KINDS]
        return [statistics.median(times) / _NS_PER_SECOND for times in spent]


@dataclass
class Trial(Generic[T]):
    """Two ways to run a step, in turns, until it is known which is faster.

    Args:
        before: how it has run so far.
        after: how it is predicted to be faster.
        seconds_before: what the latest step took.
    """

    before: T
    after: T
    seconds_before: InitVar[float]
    _seconds: tuple[list[float], list[float]] = field(init=False)

    def __post_init__(self, seconds_before: float) -> None:
        self._seconds = [seconds_before], []

    @property
    def next(self) -> T:
        """How the next step runs: the new way first."""
        return self.before if len(self._seconds[0]) <= len(self._seconds[1]) else self.after

    @property
    def is_over(self) -> bool:
        """Whether both have run often enough."""
        return min(map(len, self._seconds)) == _NUM_TRIED

    def note(self, seconds: float) -> None:
        """Add a step that ran as `next` said."""
        self._seconds[self.next is self.after].append(seconds)

    def winner(self, stage: StageContext) -> T:
        """Return what was faster; all ranks call this at the same time."""
        if stage.rank:
            kept = stage.transport.receive_object(0, "which schedule was faster")
        else:
            kept = stage.from_first_pipeline("kept" if _is_kept(*map(min, self._seconds)) else "")
            stage.transport.broadcast_object(kept, what="which schedule was faster")
        return self.after if kept else self.before


def _is_kept(before_seconds: float, after_seconds: float) -> bool:
    return after_seconds <= before_seconds * (1 + _MAX_SLOWDOWN)


Planner = Callable[[SegmentGraph, int, Costs], Schedule]
"""Makes the schedule of a graph and so many microbatches."""


def replan(stage: StageContext, schedule: Schedule, planner: Planner, meter: Meter) -> Schedule:
    """Return the schedule to run from now on; all ranks call this at the same time."""
    largest_bytes = max((transfer.num_bytes for transfer in schedule.graph.transfers), default=0)
    latency_seconds, seconds_per_byte = _measure_link(stage, largest_bytes)
    counts = schedule.graph.counts
    mine = [*meter.seconds(counts[stage.rank]), latency_seconds, seconds_per_byte]
    if stage.rank:
        stage.transport.send_bytes(
            torch.tensor(mine, dtype=torch.float64, device="cpu").view(torch.uint8), 0, Tag.COSTS
        )
        return _checked_schedule(schedule, stage.transport.receive_object(0, "the schedule"))
    measured = [mine]
    for rank in range(1, stage.size):
        num_bytes = torch.float64.itemsize * (len(_KINDS) * counts[rank] + 2)
        measured.append(stage.transport.receive_bytes(num_bytes, rank, Tag.COSTS, _WHAT).view(torch.float64).tolist())
    text = stage.from_first_pipeline(_better_schedule(schedule, planner, _costs(counts, measured)))
    stage.transport.broadcast_object(text, what="the schedule")
    return _checked_schedule(schedule, text)


def _checked_schedule(schedule: Schedule, text: str) -> Schedule:
    if not text:
        return schedule
    other = from_json(text)
    check(other)
    return other


def _better_schedule(schedule: Schedule, planner: Planner, costs: Costs) -> str:
    """Return a schedule that is worth the change as JSON, or nothing."""
    other = planner(schedule.graph, schedule.num_microbatches, costs)
    before, after = (simulate(each, costs).makespan_seconds for each in (schedule, other))
    return to_json(other) if after < before * (1 - _MIN_GAIN) else ""


def _costs(counts: tuple[int, ...], measured: list[list[float]]) -> Costs:
    """Put together what the ranks measured; every link counts as the slowest one.

    A backward that ran in one has no weight half: it is taken for one that cannot be split.
    """
    forward, backward, weight = {}, {}, {}
    for rank, count in enumerate(counts):
        for index in range(count):
            segment = Segment(rank, index)
            forward[segment], inputs, weight[segment] = measured[rank][len(_KINDS) * index :][: len(_KINDS)]
            backward[segment] = inputs + weight[segment]
    longest_seconds = max((*forward.values(), *backward.values()), default=0.0)
    return Costs(
        forward,
        backward,
        weight,
        latency_seconds=max(longest_seconds * _MIN_LATENCY_SHARE, *(each[-2] for each in measured)),
        seconds_per_byte=max(each[-1] for each in measured),
    )


def _measure_link(stage: StageContext, num_bytes: int) -> tuple[float, float]:
    """Return latency and seconds per byte of the link to the next rank; 0 on the last one, which has none.

    Even ranks ping first, then odd ones, so that all links of a host are as busy as in a step.
    """
    found = (0.0, 0.0)
    recorder, stage.transport.recorder = stage.transport.recorder, None  # pings are none of the step's messages
    for parity in (0, 1):
        pings = stage.rank % 2 == parity
        peer = stage.rank + 1 if pings else stage.rank - 1
        if not 0 <= peer < stage.size:
            continue
        empty_seconds = _ping(stage, peer, 1, first=pings)
        full_seconds = _ping(stage, peer, max(num_bytes, 1), first=pings)
        if pings:
            found = empty_seconds, max(0.0, full_seconds - empty_seconds) / max(num_bytes, 1)
    stage.transport.recorder = recorder
    return found


def _ping(stage: StageContext, peer: int, num_bytes: int, *, first: bool) -> float:
    """Send a message to and fro some times, the way that values go; return the median seconds of one way."""
    transport = stage.transport
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=stage.device)
    to, back = (P2PTransfer(_PING, *pair, 0, 0, spec_of(message)) for pair in ((stage.rank, peer), (peer, stage.rank)))
    seconds = []
    for _ in range(_NUM_PINGS):
        stage.synchronize()
        start = time.perf_counter()
        if first:
            transport.send(message, 0, to)
        transport.receive(0, back)
        if not first:
            transport.send(message, 0, to)
        stage.synchronize()
        transport.flush()
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)
