"""Play one rank's step with boundaries that leave the device and come back: a compute lane and two copy lanes.

A boundary leaves the device unless its backward is already within the window: then it stays. Its load is issued when
the work begins from which the window reaches it, and starts when its lane is free and its own copy out is complete.

As in the engine of `smpkit.torch.offload`, a boundary leaves when the forward of its layer begins, whose input it is.
The memory of a load is taken when it is issued. A boundary that is still on the device when its load is due stays
there. Device memory that was copied is given back when the next layer begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from smpkit.errors import UsageError
from smpkit.plan.offload.work import LayerTask, LinkSpeed, Window, needs_back
from smpkit.plan.schedule.graph import Kind

__all__ = [
    "Copy",
    "CopyStream",
    "CopyStreams",
    "LoadStall",
    "OffloadTimeline",
    "Rules",
    "peak_without_offloading",
    "simulate_offload",
]


@dataclass(frozen=True)
class Copy:
    """A boundary on its way."""

    work: LayerTask
    """The forward that made it, or the backward that needs it."""
    start_seconds: float
    end_seconds: float


class CopyStream:
    """One direction; what is in the queue waits for its turn, and the first of it is what is being copied."""

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self.queue: list[LayerTask] = []
        self.copies: list[Copy] = []
        """Those that have ended, in order."""
        self.is_busy = False
        self._full_rate, self._latency_seconds = bytes_per_second, latency_seconds
        self._begun_seconds = self._since_seconds = self._left_bytes = 0.0
        self._rate = bytes_per_second

    @property
    def end_seconds(self) -> float:
        """When the present copy ends if the speed stays; infinity without one."""
        return self._since_seconds + self._left_bytes / self._rate if self.is_busy else inf

    def start(self, now_seconds: float) -> None:
        """Begin the next copy."""
        self.is_busy = True
        self._begun_seconds, self._rate = now_seconds, self._full_rate
        self._since_seconds, self._left_bytes = now_seconds + self._latency_seconds, self.queue[0].num_bytes

    def moves(self, now_seconds: float) -> bool:
        """Return whether bytes are on the link, not only a latency."""
        return self.is_busy and now_seconds >= self._since_seconds

    def change_seconds(self, now_seconds: float) -> float:
        """Return when the present copy's first byte goes or, later, when it ends."""
        return self._since_seconds if self.is_busy and not self.moves(now_seconds) else self.end_seconds

    def set_share(self, share: float, now_seconds: float) -> None:
        """Let the present copy go on with this share of the full speed."""
        rate = share * self._full_rate
        if self.moves(now_seconds) and rate != self._rate:
            self._left_bytes -= (now_seconds - self._since_seconds) * self._rate
            self._since_seconds, self._rate = now_seconds, rate

    def finish(self, now_seconds: float) -> LayerTask | None:
        """Return what the present copy was of if it has ended now."""
        if not self.is_busy or self.end_seconds > now_seconds:
            return None
        self.is_busy = False
        self.copies.append(Copy(self.queue[0], self._begun_seconds, now_seconds))
        return self.queue.pop(0)


class CopyStreams:
    """Both directions of one link."""

    def __init__(self, link: LinkSpeed) -> None:
        self.out = CopyStream(link.out_bytes_per_second, link.latency_seconds)
        self.back = CopyStream(link.back_bytes_per_second, link.latency_seconds)
        self._slowdown = link.slowdown

    def share_out(self, now_seconds: float) -> None:
        """Give each direction its speed from now on."""
        both = self.out.moves(now_seconds) and self.back.moves(now_seconds)
        for lane in (self.out, self.back):
            lane.set_share(self._slowdown if both else 1.0, now_seconds)

    def change_seconds(self, now_seconds: float) -> float:
        """Return when something changes in either direction."""
        return min(self.out.change_seconds(now_seconds), self.back.change_seconds(now_seconds))


@dataclass(frozen=True)
class Rules:
    """In what the engine differs by where it runs."""

    is_planned: bool = True
    """The actions are known beforehand. Otherwise loads begin with the backward, and the latest boundaries, as many as
    the window leads, are copied but held, because the backward could begin any time."""
    ring: int | None = None
    """Compute waits until of all boundaries that leave only the latest so many are not copied; None: they pile up."""


_ENGINE: Final = Rules()


@dataclass(frozen=True)
class LoadStall:
    """A time in which compute waits: a backward for its load, or a forward for earlier copies (`Rules.ring`)."""

    work: LayerTask
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class OffloadTimeline:
    """One rank's step in time."""

    start_seconds: tuple[float, ...]
    """When each piece of work begins."""
    end_seconds: tuple[float, ...]
    outs: tuple[Copy, ...]
    loads: tuple[Copy, ...]
    kept: tuple[LayerTask, ...]
    """Forwards whose boundary never leaves, because it is needed soon."""
    stalls: tuple[LoadStall, ...]
    peak_bytes: int
    """The most that boundaries occupy on the device at a time."""
    host_peak_bytes: int
    """The most that they occupy on the host, until the end of their backward."""

    @property
    def makespan_seconds(self) -> float:
        """When the last piece of work ends."""
        return self.end_seconds[-1] if self.end_seconds else 0.0

    @property
    def stall_seconds(self) -> float:
        """How long compute waits for copies."""
        return sum(stall.end_seconds - stall.start_seconds for stall in self.stalls)

    @property
    def out_bytes(self) -> int:
        """What leaves the device."""
        return sum(copy.work.num_bytes for copy in self.outs)

    @property
    def back_bytes(self) -> int:
        """What comes back: less than what leaves if some of it was needed before it was gone."""
        return sum(copy.work.num_bytes for copy in self.loads)


def simulate_offload(
    work: Sequence[LayerTask],
    link: LinkSpeed,
    window: Window,
    not_before_seconds: Sequence[float] = (),
    rules: Rules = _ENGINE,
) -> OffloadTimeline:
    """Play the work of one rank.

    Args:
        work: from `layer_tasks`.
        not_before_seconds: for each action, when what it needs from other ranks is there; empty: at once.
    """
    num_tasks = work[-1].task + 1 if work else 0
    if not_before_seconds and len(not_before_seconds) < num_tasks:
        raise UsageError(f"{len(not_before_seconds)} start times do not belong to {num_tasks} actions")
    return _Simulator(work, link, window, not_before_seconds or [0.0] * num_tasks, rules).timeline()


def peak_without_offloading(work: Iterable[LayerTask]) -> int:
    """Return the most bytes of boundaries at a time if all of them stay on the device."""
    held = peak = 0
    for each in work:
        if each.action.kind is Kind.FORWARD:
            held += each.num_bytes
            peak = max(peak, held)
        elif needs_back(each):
            held -= each.num_bytes
    return peak


class _Simulator:
    """One run of the simulator: from one moment at which something happens to the next."""

    def __init__(
        self, work: Sequence[LayerTask], link: LinkSpeed, window: Window, not_before: Sequence[float], rules: Rules
    ) -> None:
        self._work, self._window, self._not_before, self._rules = work, window, not_before, rules
        self._backwards = {each.boundary: each for each in work if needs_back(each)}
        self._to_issue = list(reversed(self._backwards.values()))
        self._streams = CopyStreams(link)
        self._now = 0.0
        self._turn = 0.0
        """When the present piece of work could begin if nothing had to be waited for."""
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._made = 0
        self._leaving: deque[tuple[int, LayerTask]] = deque()
        """Boundaries that leave and still occupy the device, with their number."""
        self._on_host: set[tuple[int, int, int]] = set()
        self._on_device: set[tuple[int, int, int]] = set()
        """Those that backward can read."""
        self._kept: list[LayerTask] = []
        self._stalls: list[LoadStall] = []
        self._held: list[tuple[float, int]] = []
        self._held_on_host: list[tuple[float, int]] = []

    def timeline(self) -> OffloadTimeline:
        """Play to the end."""
        self._take_turn()
        while self._now < inf:
            self._start_work()
            self._start_copies()
            self._now = self._next_seconds()
            self._end_copies()
            self._end_work()
        return OffloadTimeline(
            tuple(self._starts),
            tuple(self._ends),
            tuple(self._streams.out.copies),
            tuple(self._streams.back.copies),
            tuple(self._kept),
            tuple(self._stalls),
            _peak(self._held),
            _peak(self._held_on_host),
        )

    @property
    def _runs(self) -> bool:
        return len(self._starts) > len(self._ends)

    @property
    def _present(self) -> LayerTask | None:
        return self._work[len(self._ends)] if len(self._ends) < len(self._work) else None

    def _next_seconds(self) -> float:
        """Return when something happens next; infinity after everything."""
        change = self._streams.change_seconds(self._now)
        if self._runs:
            return min(change, self._starts[-1] + self._work[len(self._ends)].seconds)
        return min(change, self._turn) if self._present and self._turn > self._now else change

    # --- compute ------------------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        """Let the next piece of work be the present one: give back what was copied, issue what its window reaches."""
        if (present := self._present) is None:
            return
        is_first = present.place == 0 or self._work[present.place - 1].task != present.task
        self._turn = max(self._now, self._not_before[present.task]) if is_first else self._now
        if is_first and self._rules.is_planned:
            self._issue(present, before=1)  # When an action begins, its first layer has not looked what was copied.
        if self._makes(present):
            self._made += 1
        self._release()
        if self._rules.is_planned or needs_back(present):
            self._issue(present)

    def _makes(self, work: LayerTask) -> bool:
        return work.action.kind is Kind.FORWARD and work.boundary in self._backwards

    def _issue(self, present: LayerTask, before: int = 0) -> None:
        while self._to_issue and self._window.reaches(present, self._to_issue[-1], before):
            need = self._to_issue[-1]
            if need.boundary in self._on_device:
                self._to_issue.pop()
                continue
            leaving = next((each for each in self._leaving if each[1].boundary == need.boundary), None)
            if leaving is None and need.boundary not in self._on_host:
                return  # Not made yet: it will be needed so soon that it stays.
            self._to_issue.pop()
            if leaving is not None:
                self._leaving.remove(leaving)
                self._on_device.add(need.boundary)
            else:
                self._streams.back.queue.append(need)
                self._held.append((self._now, need.num_bytes))

    def _start_work(self) -> None:
        present = self._present
        if present is None or self._runs or self._turn > self._now or self._waits(present):
            return
        if self._now > self._turn:
            self._stalls.append(LoadStall(present, self._turn, self._now))
            if self._rules.ring is not None:
                self._release()
        self._starts.append(self._now)
        if present.action.kind is Kind.FORWARD:
            self._held.append((self._now, present.num_bytes))
            if self._makes(present):
                self._leave(present)

    def _waits(self, present: LayerTask) -> bool:
        if needs_back(present):
            return present.boundary not in self._on_device
        ring = self._rules.ring
        return (
            ring is not None
            and self._makes(present)
            and any(number <= self._made - ring and not self._is_copied(each) for number, each in self._leaving)
        )

    def _end_work(self) -> None:
        present = self._present
        if present is None or not self._runs or self._starts[-1] + present.seconds > self._now:
            return
        if needs_back(present):
            self._held.append((self._now, -present.num_bytes))
            if present.boundary in self._on_host or self._is_queued(present):
                self._held_on_host.append((self._now, -present.num_bytes))
        elif present.action.kind is Kind.FORWARD and not self._makes(present):
            self._held.append((self._now, -present.num_bytes))
        self._ends.append(self._now)
        self._take_turn()

    # --- copies ------------------------------------------------------------------------------------------------------

    def _leave(self, forward: LayerTask) -> None:
        """Queue a boundary for the host, or keep it."""
        if self._rules.is_planned and self._window.reaches(forward, self._backwards[forward.boundary]):
            self._kept.append(forward)
            self._on_device.add(forward.boundary)
            return
        self._leaving.append((self._made, forward))
        self._held_on_host.append((self._now, forward.num_bytes))
        self._streams.out.queue.append(forward)

    def _is_copied(self, forward: LayerTask) -> bool:
        return forward.boundary in self._on_host

    def _is_queued(self, need: LayerTask) -> bool:
        return any(each.boundary == need.boundary for each in self._streams.out.queue)

    def _release(self) -> None:
        """Give back device memory whose copy is complete, in order."""
        held = 0 if self._rules.is_planned else self._window.lead or 0
        while self._leaving and self._is_copied(self._leaving[0][1]) and self._leaving[0][0] <= self._made - held:
            _, forward = self._leaving.popleft()
            self._held.append((self._now, -forward.num_bytes))

    def _start_copies(self) -> None:
        out, back = self._streams.out, self._streams.back
        if out.queue and not out.is_busy:
            out.start(self._now)
        if back.queue and not back.is_busy and back.queue[0].boundary in self._on_host:
            back.start(self._now)
        self._streams.share_out(self._now)

    def _end_copies(self) -> None:
        if left := self._streams.out.finish(self._now):
            self._on_host.add(left.boundary)
        if loaded := self._streams.back.finish(self._now):
            self._on_device.add(loaded.boundary)


def _peak(held: Iterable[tuple[float, int]]) -> int:
    """Return the most bytes at a time, of times and bytes that are taken or freed then, as they came."""
    total = peak = 0
    for _, num_bytes in held:
        total += num_bytes
        peak = max(peak, total)
    return peak
