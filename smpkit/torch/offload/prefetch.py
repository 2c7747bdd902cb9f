"""Which groups backward needs next: from the pipeline's actions when there are some, else the reverse of forward.

Distances are counted in layers, forward and backward alike, because a layer is the time that one load hides behind::

    actions        F4            B1            F5           the present place is the first layer of F4
    layers      l0 l1 l2     l2 l1 l0      l0 l1 l2
    distance    now 1  2      3  4  5                       with a lead of 3, the last layer of microbatch 1 loads now
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind

__all__ = ["Order"]

_Task = tuple[int, int]
"""Segment and microbatch."""


class Order:
    """Knows the groups of all graphs that are alive, and predicts when backward needs them.

    Args:
        horizon: `activation_loading_horizon`: how many tasks of the pipeline ahead at most; None: no bound.
    """

    def __init__(self, horizon: int | None = None) -> None:
        self.horizon = horizon
        self._actions: Sequence[Action] = ()
        self._place = -1
        self._task: _Task | None = None
        self._passed = 0
        self._layers: dict[int, int] = {}
        """How many groups a forward of each segment makes."""
        self._groups: dict[_Task, list[int]] = {}
        self._live: list[int] = []
        self._used: set[int] = set()
        self._count = 0
        self._base = 0
        self._last_used: int | None = None
        self._after: dict[int, int] = {}
        """Without actions: which group followed which in an earlier backward, counted from the first of its forward."""

    # --- what happens ------------------------------------------------------------------------------------------------

    def follow(self, actions: Sequence[Action]) -> None:
        """Predict from these actions of this rank, whose first comes next; none: from what forward did."""
        self._actions = actions
        self._place = -1

    def begin(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Note that an action begins."""
        if self._task is not None and self._passed:
            self._layers[self._task[0]] = self._passed
        self._passed = 0
        self._task = (segment, microbatch)
        following = range(self._place + 1, len(self._actions))
        action = Action(kind, segment, microbatch)
        found = next((place for place in following if self._actions[place] == action), None)
        if found is None:  # the step left its plan, so the plan says nothing about what comes
            self._actions = ()
        else:
            self._place = found

    def end(self) -> None:
        """Note that the step is over."""
        self._actions, self._place, self._task, self._passed = (), -1, None, 0
        self._groups = {task: live for task, groups in self._groups.items() if (live := self._alive(groups))}

    def add(self) -> int:
        """Return the number of a new group, which belongs to the present forward."""
        index = self._count
        self._count += 1
        self._live.append(index)
        if self._task is not None:
            self._groups.setdefault(self._task, []).append(index)
            self._passed += 1
        self._last_used = None  # forward goes on: what backward needed last says nothing about what it needs next
        return index

    def use(self, index: int) -> None:
        """Note that backward has come to a group."""
        if index in self._used:  # the graph was kept, and backward comes again
            self._used.clear()
        last, self._last_used = self._last_used, index
        if last is not None and last >= self._base:
            self._after[last - self._base] = index - self._base
        self._used.add(index)

    def drop(self, index: int) -> None:
        """Note that a group is gone with its graph."""
        place = bisect_left(self._live, index)
        if self._live[place : place + 1] == [index]:
            del self._live[place]
        self._used.discard(index)
        if not self._live:
            self._base, self._last_used = self._count, None

    # --- what comes --------------------------------------------------------------------------------------------------

    def upcoming(self, lead: int) -> list[int]:
        """Return the groups that are needed within `lead` layers, the next one first."""
        if self._last_used is None and not self._actions:
            return []
        return list(self._planned(lead)) if self._actions else list(self._reversed(lead))

    @property
    def is_planned(self) -> bool:
        """Whether there are actions to predict from."""
        return bool(self._actions)

    def is_recent(self, index: int, count: int) -> bool:
        """Return whether a group is among the last `count` that forward has made."""
        return index > self._count - 1 - count

    def returns_within(self, lead: int) -> bool:
        """Return whether the group that was added last is needed again within `lead` layers of the plan."""
        if not self._actions:
            return False
        distance = left = self._left()
        for action in self._ahead():
            task = (action.segment, action.microbatch)
            if action.kind is Kind.BACKWARD and task == self._task:
                return distance + left + 1 <= lead
            distance += len(self._groups.get(task, ())) if action.kind is Kind.BACKWARD else self._expected(action)
            if distance >= lead:
                return False
        return False

    def _expected(self, action: Action) -> int:
        """Return how many layers an action that has not begun has."""
        return self._layers.get(action.segment, 0) if action.kind is Kind.FORWARD else 0

    def _left(self) -> int:
        """Return how many layers of the present forward are still to come."""
        assert self._task is not None
        return max(0, self._layers.get(self._task[0], 0) - self._passed)

    def _ahead(self) -> Iterator[Action]:
        """Yield the actions after the present one that the horizon allows to load for."""
        stop = None if self.horizon is None else self._place + 1 + self.horizon
        return islice(self._actions, self._place + 1, stop)

    def _planned(self, lead: int) -> Iterator[int]:
        distance = 0
        if self._place >= 0:
            now = self._actions[self._place]
            if now.kind is Kind.FORWARD:
                distance = self._left()
            elif now.kind is Kind.BACKWARD:
                yield from islice(self._remaining((now.segment, now.microbatch)), lead)
                distance = sum(1 for _ in self._remaining((now.segment, now.microbatch)))
        for action in self._ahead():
            if distance >= lead:
                return
            distance += self._expected(action)
            # A weight half of a backward needs nothing back: the input half has brought it.
            for index in (
                () if action.kind is not Kind.BACKWARD else self._remaining((action.segment, action.microbatch))
            ):
                distance += 1
                if distance > lead:
                    return
                yield index

    def _remaining(self, task: _Task) -> Iterator[int]:
        """Yield the groups of a task that backward has not come to, in its order."""
        live = self._alive(self._groups.get(task, ()))
        return (index for index in reversed(live) if index not in self._used)

    def _reversed(self, lead: int) -> Iterator[int]:
        index = self._last_used
        seen = set[int]()
        while index is not None and len(seen) < lead:
            index = self._following(index)
            if index is None or index in seen:
                return
            seen.add(index)
            yield index

    def _following(self, index: int) -> int | None:
        """Return what backward is expected to need after a group: what it needed last time, else the one before it."""
        learnt = self._after.get(index - self._base)
        if learnt is not None and self._is_waiting(learnt + self._base):
            return learnt + self._base
        place = bisect_left(self._live, index) - 1
        while place >= 0 and self._live[place] in self._used:
            place -= 1
        return self._live[place] if place >= 0 else None

    def _is_waiting(self, index: int) -> bool:
        return bool(self._alive([index])) and index not in self._used

    def _alive(self, groups: Sequence[int]) -> list[int]:
        live = self._live
        return [g for g in groups if (place := bisect_left(live, g)) < len(live) and live[place] == g]
