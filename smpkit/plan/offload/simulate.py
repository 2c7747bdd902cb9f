"""Simulate one rank's step with boundaries that leave the device and come back: a compute and two copy streams.

A boundary leaves the device unless its backward is already within the window: then it stays. Its load is issued when
the layer task begins from which the window reaches it, and starts when its stream is free and its own copy out is
complete.

As in the engine of `smpkit.torch.offload`, a boundary leaves when the forward of its layer begins, whose input it is.
The memory of a load is taken when it is issued. A boundary that is still on the device when its load is due stays
there. Device memory that was copied is given back when the next layer begins (but see `Rules.ring`).
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
    "ON_A_GPU",
    "ON_A_GPU_ALONE",
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

    task: LayerTask
    """The forward that made it, or the backward that needs it."""
    start_seconds: float
    end_seconds: float


class CopyStream:
    """One direction of the link; the first boundary of the queue is the one being copied."""

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
        """When the present copy ends if its speed stays; infinity without one."""
        if not self.is_busy:
            return inf
        return self._since_seconds + self._left_bytes / self._rate

    def start(self, now_seconds: float) -> None:
        """Begin the next copy."""
        self.is_busy = True
        self._begun_seconds, self._rate = now_seconds, self._full_rate
        self._since_seconds, self._left_bytes = now_seconds + self._latency_seconds, self.queue[0].num_bytes

    def moves(self, now_seconds: float) -> bool:
        """Return whether bytes are on the link: the latency of the present copy is over."""
        return self.is_busy and now_seconds >= self._since_seconds

    def change_seconds(self, now_seconds: float) -> float:
        """Return when the first byte of the present copy leaves or, once it has, when the copy ends."""
        if self.is_busy and not self.moves(now_seconds):
            return self._since_seconds
        return self.end_seconds

    def set_share(self, share: float, now_seconds: float) -> None:
        """Continue the present copy at this share of the full speed."""
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
        """Set the speed of each direction from now on."""
        both = self.out.moves(now_seconds) and self.back.moves(now_seconds)
        for stream in (self.out, self.back):
            stream.set_share(self._slowdown if both else 1.0, now_seconds)

    def change_seconds(self, now_seconds: float) -> float:
        """Return when something changes in either direction."""
        return min(self.out.change_seconds(now_seconds), self.back.change_seconds(now_seconds))


@dataclass(frozen=True)
class Rules:
    """How the engine works, which depends on where it runs."""

    is_planned: bool = True
    """The actions are known beforehand. Otherwise loads begin with the backward, and the latest boundaries, as many as
    the window leads, are copied but held, because the backward could begin any time."""
    ring: int | None = None
    """The host runs ahead of the device, so it cannot know when a copy has ended: all boundaries that leave but the
    latest so many are given back, and compute waits for their copies. None: each is given back when it is copied."""


_ENGINE: Final = Rules()
ON_A_GPU: Final = Rules(ring=2)
"""The engine on a device that runs behind the host, in a pipeline."""
ON_A_GPU_ALONE: Final = Rules(is_planned=False, ring=2)
"""The same without a pipeline: there is no list of actions to plan from."""


@dataclass(frozen=True)
class LoadStall:
    """A time in which compute waits: a backward for its load, or for copies whose memory is given back."""

    task: LayerTask
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class OffloadTimeline:
    """One rank's step in time."""

    start_seconds: tuple[float, ...]
    """When each layer task begins."""
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
        """When the last layer task ends."""
        return self.end_seconds[-1] if self.end_seconds else 0.0

    @property
    def stall_seconds(self) -> float:
        """How long compute waits for copies."""
        return sum(stall.end_seconds - stall.start_seconds for stall in self.stalls)

    @property
    def out_bytes(self) -> int:
        """What leaves the device."""
        return sum(copy.task.num_bytes for copy in self.outs)

    @property
    def back_bytes(self) -> int:
        """What comes back: less than what leaves if some of it was needed before it was gone."""
        return sum(copy.task.num_bytes for copy in self.loads)


def simulate_offload(
    tasks: Sequence[LayerTask],
    link: LinkSpeed,
    window: Window,
    not_before_seconds: Sequence[float] = (),
    rules: Rules = _ENGINE,
) -> OffloadTimeline:
    """Simulate one rank.

    Args:
        tasks: from `layer_tasks`.
        not_before_seconds: for each action, when what it needs from other ranks is there; empty: at once.
    """
    num_actions = tasks[-1].action_index + 1 if tasks else 0
    if not_before_seconds and len(not_before_seconds) < num_actions:
        raise UsageError(f"{len(not_before_seconds)} start times do not belong to {num_actions} actions")
    return _Simulator(tasks, link, window, not_before_seconds or [0.0] * num_actions, rules).timeline()


def peak_without_offloading(tasks: Iterable[LayerTask]) -> int:
    """Return the most bytes of boundaries at a time if all of them stay on the device."""
    held = peak = 0
    for each in tasks:
        if each.action.kind is Kind.FORWARD:
            held += each.num_bytes
            peak = max(peak, held)
        elif needs_back(each):
            held -= each.num_bytes
    return peak


class _Memory:
    """What boundaries occupy on the device or on the host."""

    def __init__(self) -> None:
        self._num_bytes = self.peak_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Occupy memory."""
        self._num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def free(self, num_bytes: int) -> None:
        """Give memory back."""
        self._num_bytes -= num_bytes


class _Simulator:
    """One run of the simulator; time jumps from one event to the next."""

    def __init__(
        self, tasks: Sequence[LayerTask], link: LinkSpeed, window: Window, not_before: Sequence[float], rules: Rules
    ) -> None:
        self._tasks, self._window, self._not_before, self._rules = tasks, window, not_before, rules
        self._backwards = {each.boundary: each for each in tasks if needs_back(each)}
        self._to_issue = list(reversed(self._backwards.values()))
        self._streams = CopyStreams(link)
        self._now = 0.0
        self._turn = 0.0
        """When the present layer task could begin if it had to wait for no copy."""
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._made = 0
        self._leaving: deque[tuple[int, LayerTask]] = deque()
        """Boundaries that leave and still occupy the device, with their number."""
        self._on_host: set[tuple[int, int, int]] = set()
        self._on_device: set[tuple[int, int, int]] = set()
        """Those that backward can read."""
        self._owed: set[tuple[int, int, int]] = set()
        """Given back before they are copied: compute waits for that."""
        self._issues = False
        """Whether the present layer task has yet to issue its loads."""
        self._kept: list[LayerTask] = []
        self._stalls: list[LoadStall] = []
        self._device, self._host = _Memory(), _Memory()

    def timeline(self) -> OffloadTimeline:
        """Run to the end."""
        self._take_turn()
        while self._now < inf:
            self._start_task()
            self._start_copies()
            self._now = self._next_seconds()
            self._end_copies()
            self._end_task()
        return OffloadTimeline(
            start_seconds=tuple(self._starts),
            end_seconds=tuple(self._ends),
            outs=tuple(self._streams.out.copies),
            loads=tuple(self._streams.back.copies),
            kept=tuple(self._kept),
            stalls=tuple(self._stalls),
            peak_bytes=self._device.peak_bytes,
            host_peak_bytes=self._host.peak_bytes,
        )

    @property
    def _runs(self) -> bool:
        """Whether the present layer task has begun."""
        return len(self._starts) > len(self._ends)

    @property
    def _present(self) -> LayerTask | None:
        return self._tasks[len(self._ends)] if len(self._ends) < len(self._tasks) else None

    def _next_seconds(self) -> float:
        """Return when something happens next; infinity after everything."""
        change = self._streams.change_seconds(self._now)
        if self._runs:
            return min(change, self._starts[-1] + self._tasks[len(self._ends)].seconds)
        if self._present and self._turn > self._now:
            return min(change, self._turn)
        return change

    # --- compute ------------------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        """Make the next layer task the present one: free what was copied out, issue the loads in its window."""
        if (present := self._present) is None:
            return
        self._turn = self._now
        if present.index == 0 or self._tasks[present.index - 1].action_index != present.action_index:
            self._turn = max(self._now, self._not_before[present.action_index])
            if self._rules.is_planned:
                # The engine also issues loads when an action begins, before its first layer frees what was copied out.
                self._issue(present, before=1)
        if self._makes(present):
            self._made += 1
        self._release()
        self._issues = self._rules.is_planned or needs_back(present)
        self._issue_present(present)

    def _issue_present(self, present: LayerTask) -> None:
        """Issue the loads of the present layer task: behind the copies that compute waits for, as streams have it."""
        if self._issues and not self._owed:
            self._issues = False
            self._issue(present)

    def _makes(self, task: LayerTask) -> bool:
        """Return whether it is a forward whose boundary a backward needs."""
        return task.action.kind is Kind.FORWARD and task.boundary in self._backwards

    def _issue(self, present: LayerTask, before: int = 0) -> None:
        """Queue the loads that the window reaches `before` layer tasks before the present one begins."""
        while self._to_issue and self._window.reaches(present, self._to_issue[-1], before):
            need = self._to_issue[-1]
            if need.boundary in self._on_device:
                self._to_issue.pop()
                continue
            leaving = next((each for each in self._leaving if each[1].boundary == need.boundary), None)
            if leaving is None and need.boundary not in self._on_host | self._owed:
                return  # Not made yet: it will be needed so soon that it stays.
            self._to_issue.pop()
            if leaving is not None:
                self._leaving.remove(leaving)
                self._on_device.add(need.boundary)
            else:
                self._streams.back.queue.append(need)
                self._device.take(need.num_bytes)

    def _start_task(self) -> None:
        """Begin the present layer task if nothing holds it back."""
        present = self._present
        if present is None or self._runs or self._turn > self._now:
            return
        self._issue_present(present)
        if self._waits(present):
            return
        if self._now > self._turn:
            self._stalls.append(LoadStall(present, self._turn, self._now))
        self._starts.append(self._now)
        if present.action.kind is Kind.FORWARD:
            self._device.take(present.num_bytes)
            if self._makes(present):
                self._leave(present)

    def _waits(self, present: LayerTask) -> bool:
        if self._owed or (needs_back(present) and present.boundary not in self._on_device):
            return True
        # A backward gives its boundary back, and where the host is ahead the copy out has to be over before that.
        return self._rules.ring is not None and needs_back(present) and self._is_queued(present)

    def _end_task(self) -> None:
        """End the present layer task if its time is over."""
        present = self._present
        if present is None or not self._runs or self._starts[-1] + present.seconds > self._now:
            return
        if needs_back(present):
            self._device.free(present.num_bytes)
            if present.boundary in self._on_host or self._is_queued(present):
                self._host.free(present.num_bytes)
        elif present.action.kind is Kind.FORWARD and not self._makes(present):
            self._device.free(present.num_bytes)
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
        self._host.take(forward.num_bytes)
        self._streams.out.queue.append(forward)

    def _is_queued(self, need: LayerTask) -> bool:
        return any(each.boundary == need.boundary for each in self._streams.out.queue)

    def _release(self) -> None:
        """Give back device memory in order: what is copied or, where the host is ahead, what is not the latest."""
        num_held = max(0 if self._rules.is_planned else self._window.lead or 0, self._rules.ring or 0)
        while self._leaving:
            number, forward = self._leaving[0]
            is_copied = forward.boundary in self._on_host
            if number > self._made - num_held or (self._rules.ring is None and not is_copied):
                return
            self._leaving.popleft()
            self._device.free(forward.num_bytes)
            if not is_copied:
                self._owed.add(forward.boundary)

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
            self._owed.discard(left.boundary)
        if loaded := self._streams.back.finish(self._now):
            self._on_device.add(loaded.boundary)
