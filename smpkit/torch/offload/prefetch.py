"""Which groups backward needs next (`BackwardOrder`), and how far ahead their loads are issued (`PrefetchTuner`).

A *group* is what one layer saves. Their order comes from the pipeline's actions if there are some, else it is the
reverse of forward. How far ahead, the *lead*, is learned from how long layers and copies took. Distances are counted
in layers, forward and backward alike, because a layer is the time that one load hides behind::

    actions        F4            B1            F5           the current position is the first layer of F4
    layers      l0 l1 l2     l2 l1 l0      l0 l1 l2
    distance    now 1  2      3  4  5                       with a lead of 3, the last layer of microbatch 1 loads now
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Final, Literal

from smpkit.errors import UsageError
from smpkit.plan.offload.work import auto_lead
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.link import Link, Wait

__all__ = ["BackwardOrder", "Lead", "PrefetchTuner", "check_lead"]


Lead = int | Literal["auto"]

_INITIAL_LEAD: Final = 2  # enough while a copy takes no longer than a forward
_MAX_LEAD: Final = 16

_Task = tuple[int, int]
"""Segment and microbatch; its forward and its backward are two actions."""


def check_lead(lead: object) -> None:
    """Raise UsageError unless `lead` is "auto" or a positive number of layers."""
    if lead != "auto" and (not isinstance(lead, int) or isinstance(lead, bool) or lead < 1):
        raise UsageError(f"`lead` is {lead!r}", hint='use "auto" or a number of layers, 1 or more')


@dataclass
class _LayerTiming:
    """A layer's forward or backward, from its start to that of the next."""

    stamp: Any
    load_bytes: int
    wait: Wait | None = None


class PrefetchTuner:
    """Keeps the lead: a given one, or the smallest with which the last step would not have stalled.

    Args:
        lead: in layers; "auto" learns.
    """

    def __init__(self, link: Link, lead: Lead) -> None:
        self._link = link
        self._learns = lead == "auto"
        self.lead = _INITIAL_LEAD if lead == "auto" else lead
        self._timings: list[_LayerTiming] = []
        self._last: list[_LayerTiming] = []

    def begin_layer(self, load_bytes: int) -> None:
        """Note that a layer begins, and how many bytes it needs back."""
        if self._learns:
            self._timings.append(_LayerTiming(self._link.stamp(), load_bytes))

    def add_wait(self, wait: Wait) -> None:
        """Note that the current layer had to wait for its load."""
        if self._timings:
            self._timings[-1].wait = wait

    def end_step(self) -> None:
        """Adapt the lead to the timings of a completed step."""
        # A device that runs behind this thread may not have finished this step: use the one before.
        timings, self._last, self._timings = self._last, self._timings, []
        if not self._link.is_stream_ordered:
            timings, self._last = self._last, []
        seconds = [self._seconds(timing, following) for timing, following in pairwise(timings)]
        if not seconds or None in seconds:
            return
        compute = [each for each in seconds if each is not None]
        loads = [self._load_seconds(timing) for timing in timings[:-1]]
        # The last layer has no successor and hence no duration; count its load all the same, it is the most urgent.
        needed = auto_lead([*compute, 0.0], [*loads, self._load_seconds(timings[-1])], _MAX_LEAD)
        self.lead = max(needed, self.lead - 1)  # shrink slowly: one quiet step proves little

    def _seconds(self, timing: _LayerTiming, following: _LayerTiming) -> float | None:
        seconds = self._link.seconds_between(timing.stamp, following.stamp)
        stalled = 0.0 if timing.wait is None else timing.wait.seconds
        return None if seconds is None or stalled is None else max(0.0, seconds - stalled)

    def _load_seconds(self, timing: _LayerTiming) -> float:
        link = self._link
        return link.latency_seconds + timing.load_bytes / link.back_bytes_per_second if timing.load_bytes else 0.0


class BackwardOrder:
    """Knows the groups of all graphs that are alive, and predicts when backward needs them.

    Args:
        horizon: `activation_loading_horizon`: over how many of this rank's next pipeline actions loads may reach,
            besides the rest of the current one; None: no bound. Within it the lead decides, and without a pipeline,
            which has no actions, the lead alone.
    """

    def __init__(self, horizon: int | None = None) -> None:
        self.horizon = horizon
        self._actions: Sequence[Action] = ()
        self._position = -1
        self._task: _Task | None = None
        self._num_done = 0
        self._layers: dict[int, int] = {}
        """How many groups a forward of each segment makes, as far as one has run."""
        self._groups: dict[_Task, list[int]] = {}
        self._live: list[int] = []
        self._used: set[int] = set()
        self._count = 0
        self._base = 0
        self._last_used: int | None = None
        self._followed_by: dict[int, int] = {}
        """Without actions: which group followed which in an earlier backward, counted from the first of its forward."""

    # --- what has happened -------------------------------------------------------------------------------------------

    def follow(self, actions: Sequence[Action]) -> None:
        """Predict from these actions of this rank, starting with the first; if empty, from what forward did."""
        self._actions = actions
        self._position = -1

    def begin(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Note that an action begins."""
        if self._task is not None and self._num_done:
            self._layers[self._task[0]] = self._num_done
        self._num_done = 0
        self._task = (segment, microbatch)
        following = range(self._position + 1, len(self._actions))
        action = Action(kind, segment, microbatch)
        found = next((position for position in following if self._actions[position] == action), None)
        if found is None:  # the step has diverged from its plan, which predicts nothing any more
            self._actions = ()
        else:
            self._position = found

    def end(self) -> None:
        """Note that the step is over."""
        self._actions, self._position, self._task, self._num_done = (), -1, None, 0
        self._groups = {task: live for task, groups in self._groups.items() if (live := self._still_live(groups))}

    def add(self) -> int:
        """Return the index of a new group, which belongs to the current forward."""
        index = self._count
        self._count += 1
        self._live.append(index)
        if self._task is not None:
            self._groups.setdefault(self._task, []).append(index)
            self._num_done += 1
        self._last_used = None  # forward goes on, so the next backward starts anew
        return index

    def begin_backward(self, index: int) -> None:
        """Note that the backward of a group begins."""
        if index in self._used:  # `retain_graph`: another backward through the same graph
            self._used.clear()
        last, self._last_used = self._last_used, index
        if last is not None and last >= self._base:
            self._followed_by[last - self._base] = index - self._base
        self._used.add(index)

    def drop(self, index: int) -> None:
        """Note that a group is gone with its graph."""
        position = bisect_left(self._live, index)
        if self._live[position : position + 1] == [index]:
            del self._live[position]
        self._used.discard(index)
        if not self._live:
            self._base, self._last_used = self._count, None

    # --- what comes next ---------------------------------------------------------------------------------------------

    def upcoming(self, lead: int) -> list[int]:
        """Return the groups that are needed within `lead` layers, the next one first."""
        if self._actions:
            return list(self._planned(lead))
        return [] if self._last_used is None else list(self._reversed(lead))

    @property
    def is_planned(self) -> bool:
        """Whether there are actions to predict from."""
        return bool(self._actions)

    def is_recent(self, index: int, count: int) -> bool:
        """Return whether a group is among the last `count` of forward."""
        return index > self._count - 1 - count

    def is_needed_within(self, lead: int) -> bool:
        """Return whether the plan needs the latest group again within `lead` layers."""
        if not self._actions:
            return False
        distance = left = self._num_left()
        for action in self._next_actions():
            task = (action.segment, action.microbatch)
            if action.kind is Kind.BACKWARD and task == self._task:
                return distance + left + 1 <= lead
            if action.kind is Kind.BACKWARD:
                distance += len(self._groups.get(task, ()))
            else:
                distance += self._num_expected(action)
            if distance >= lead:
                return False
        return False

    def _num_expected(self, action: Action) -> int:
        """Return how many layers a forward that has not begun has."""
        return self._layers.get(action.segment, 0) if action.kind is Kind.FORWARD else 0

    def _num_left(self) -> int:
        """Return how many layers of the current forward are still to come."""
        assert self._task is not None
        return max(0, self._layers.get(self._task[0], 0) - self._num_done)

    def _next_actions(self) -> Iterator[Action]:
        """Yield the actions after the current one, as far as the horizon allows loads for them."""
        stop = None if self.horizon is None else self._position + 1 + self.horizon
        return islice(self._actions, self._position + 1, stop)

    def _planned(self, lead: int) -> Iterator[int]:
        distance = 0
        if self._position >= 0:
            now = self._actions[self._position]
            if now.kind is Kind.FORWARD:
                distance = self._num_left()
            elif now.kind is Kind.BACKWARD:
                yield from islice(self._remaining((now.segment, now.microbatch)), lead)
                distance = sum(1 for _ in self._remaining((now.segment, now.microbatch)))
        for action in self._next_actions():
            if distance >= lead:
                return
            distance += self._num_expected(action)
            # The weight half of a split backward (zero bubble) needs no load: the input half has loaded it.
            if action.kind is not Kind.BACKWARD:
                continue
            for index in self._remaining((action.segment, action.microbatch)):
                distance += 1
                if distance > lead:
                    return
                yield index

    def _remaining(self, task: _Task) -> Iterator[int]:
        """Yield the groups of a task whose backward is still to come, in the order of backward."""
        live = self._still_live(self._groups.get(task, ()))
        return (index for index in reversed(live) if index not in self._used)

    def _reversed(self, lead: int) -> Iterator[int]:
        index = self._last_used
        seen = set[int]()
        while index is not None and len(seen) < lead:
            index = self._predicted_next(index)
            if index is None or index in seen:
                return
            seen.add(index)
            yield index

    def _predicted_next(self, index: int) -> int | None:
        """Return what backward should need after a group: what it needed last time, else the one before it."""
        recorded = self._followed_by.get(index - self._base)
        if recorded is not None and self._is_waiting(recorded + self._base):
            return recorded + self._base
        position = bisect_left(self._live, index) - 1
        while position >= 0 and self._live[position] in self._used:
            position -= 1
        return self._live[position] if position >= 0 else None

    def _is_waiting(self, index: int) -> bool:
        return bool(self._still_live([index])) and index not in self._used

    def _still_live(self, groups: Sequence[int]) -> list[int]:
        live = self._live
        return [g for g in groups if (position := bisect_left(live, g)) < len(live) and live[position] == g]
