"""Plan a step again from the measured times of its actions and messages.

The first schedule follows from the graph alone. After the second step, every rank sends pp_rank 0 the median compute
time of its segments and the speed of the link to the next rank. pp_rank 0 plans with these costs and broadcasts the
schedule: a slow link is hidden by holding more microbatches, as far as `active_microbatches` allows. The order in which
a rank accumulates gradients, ascending microbatches, stays. Pipelines that tensor parallelism joins follow the first of
them.

The prediction may be wrong: more live microbatches need more memory, caches and cores. So the new schedule and the one
before alternate for some steps, and pp_rank 0, which is the first to begin and the last to end a step, broadcasts which
of them was faster.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Final, Generic, TypeVar

import torch

from smpkit.plan.decide import with_jitter
from smpkit.plan.schedule.actions import Costs, Schedule, from_json, to_json
from smpkit.plan.schedule.checker import check
from smpkit.plan.schedule.graph import Kind, Segment
from smpkit.torch.core.tensor_spec import spec_of
from smpkit.torch.pipeline.message_order import TRANSFERS_PER_MICROBATCH, P2PTransfer
from smpkit.torch.pipeline.messages import Tag
from smpkit.torch.pipeline.stage_context import StageContext

__all__ = ["Meter", "Trial", "replan"]

T = TypeVar("T")

_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
_NUM_TRIED: Final = 2
"""Steps that each schedule runs, with the measured step for the one before; the fastest of them counts."""
_MAX_SLOWDOWN: Final = 0.03
"""The new schedule is kept unless it measures slower than the one before by more than this share."""
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
    """Two plans of a step, which alternate until it is known which is faster.

    Args:
        before: the plan so far.
        after: the one that is predicted to be faster.
        seconds_before: the time of the latest step.
    """

    before: T
    after: T
    seconds_before: InitVar[float]
    _seconds: tuple[list[float], list[float]] = field(init=False)

    def __post_init__(self, seconds_before: float) -> None:
        self._seconds = [seconds_before], []

    @property
    def next(self) -> T:
        """The plan of the next step; the new one first."""
        return self.before if len(self._seconds[0]) <= len(self._seconds[1]) else self.after

    @property
    def is_over(self) -> bool:
        """Whether both have run often enough."""
        return min(map(len, self._seconds)) == _NUM_TRIED

    def note(self, seconds: float) -> None:
        """Add a step that ran as `next` said."""
        self._seconds[self.next is self.after].append(seconds)

    def winner(self, stage: StageContext) -> T:
        """Return the faster plan, as pp_rank 0 broadcasts it; all ranks call this."""
        if stage.rank:
            kept = stage.transport.receive_object(0, "which schedule was faster")
        else:
            kept = stage.from_first_pipeline("kept" if _is_kept(*map(min, self._seconds)) else "")
            _tell_others(stage, kept, "which schedule was faster")
        return self.after if kept else self.before


def _is_kept(before_seconds: float, after_seconds: float) -> bool:
    return after_seconds <= before_seconds * (1 + _MAX_SLOWDOWN)


Planner = Callable[[Schedule, Costs], Schedule]
"""Returns the schedule that is worth the change with these costs, or the same one."""


def replan(stage: StageContext, schedule: Schedule, planner: Planner, meter: Meter) -> Schedule:
    """Return the schedule to run from now on, as pp_rank 0 broadcasts it; all ranks call this."""
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
    better = planner(schedule, with_jitter(_costs(counts, measured), schedule.graph))
    text = stage.from_first_pipeline("" if better is schedule else to_json(better))
    _tell_others(stage, text, "the schedule")
    return _checked_schedule(schedule, text)


def _tell_others(stage: StageContext, text: str, what: str) -> None:
    """Broadcast from pp_rank 0, and wait until all have it: what is under way when a script ends never arrives."""
    stage.transport.broadcast_object(text, what=what)
    stage.transport.flush()


def _checked_schedule(schedule: Schedule, text: str) -> Schedule:
    if not text:
        return schedule
    other = from_json(text)
    check(other)
    return other


def _costs(counts: tuple[int, ...], measured: list[list[float]]) -> Costs:
    """Return the costs that the ranks measured; every link counts as the slowest one.

    A backward that ran whole has no weight half, and counts as one that cannot be split.
    """
    forward, backward, weight = {}, {}, {}
    for rank, count in enumerate(counts):
        for index in range(count):
            segment, first = Segment(rank, index), len(_KINDS) * index
            forward[segment], inputs, weight[segment] = measured[rank][first : first + len(_KINDS)]
            backward[segment] = inputs + weight[segment]
    return Costs(
        forward,
        backward,
        weight,
        latency_seconds=max(each[-2] for each in measured),
        seconds_per_byte=max(each[-1] for each in measured),
    )


def _measure_link(stage: StageContext, num_bytes: int) -> tuple[float, float]:
    """Return latency and seconds per byte of the link to the next rank; 0 on the last one, which has none.

    Even ranks ping first, then odd ones, so that all links of a host are as busy as in a step.
    """
    # Messages go through the transport as values do, but are not recorded: they are not part of the step.
    found = (0.0, 0.0)
    transport = stage.transport
    recorder, transport.recorder = transport.recorder, None
    transport.follow(None)
    transport.awaits_data = True
    for parity in (0, 1):
        pings = stage.rank % 2 == parity
        peer = stage.rank + 1 if pings else stage.rank - 1
        if not 0 <= peer < stage.size:
            continue
        empty_seconds = _ping(stage, peer, 1, first=pings)
        full_seconds = _ping(stage, peer, max(num_bytes, 1), first=pings)
        if pings:
            found = empty_seconds, max(0.0, full_seconds - empty_seconds) / max(num_bytes, 1)
    transport.end_messages()
    transport.recorder = recorder
    return found


def _ping(stage: StageContext, peer: int, num_bytes: int, *, first: bool) -> float:
    """Send a message back and forth some times, as values are sent; return the median seconds of one way."""
    transport = stage.transport
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=stage.device)
    spec = spec_of(message)
    to = P2PTransfer(_PING, stage.rank, peer, 0, 0, spec)
    back = P2PTransfer(_PING, peer, stage.rank, 0, 0, spec)
    seconds = []
    for _ in range(_NUM_PINGS):
        start = time.perf_counter()
        if first:
            transport.send(message, 0, to)
        transport.receive(0, back)
        if not first:
            transport.send(message, 0, to)
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds)
