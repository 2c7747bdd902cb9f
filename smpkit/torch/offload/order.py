"""Which checkpointed calls backward comes to next (`BackwardOrder`), and how far ahead it loads (`LeadTuner`).

The order comes from the pipeline's actions; without a pipeline it is the reverse of forward. How far ahead, the *lead*,
is learned from how long layers and copies took. Distances count calls, forward and backward alike, because a load hides
behind the time of a layer::

    actions        F4            B1            F5           the current position is the first layer of F4
    layers      l0 l1 l2     l2 l1 l0      l0 l1 l2
    distance    now 1  2      3  4  5                       with a lead of 3, the last layer of microbatch 1 loads now
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Final, Literal

from smpkit.errors import UsageError
from smpkit.plan.offload.work import auto_lead
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.link import Link

Lead = int | Literal["auto"]
_INITIAL_LEAD: Final = 2  # enough while a copy takes no longer than a forward
_Task = tuple[int, int]
"""Segment and microbatch; its forward and its backward are two actions."""


def check_lead(lead: object) -> None:
    """Raise UsageError unless `lead` is "auto" or a positive number of layers."""
    if lead != "auto" and (not isinstance(lead, int) or isinstance(lead, bool) or lead < 1):
        raise UsageError(f"`lead` is {lead!r}", hint='use "auto" or a number of layers, 1 or more')


class BackwardOrder:
    """Knows the calls whose backward is to come, by number, and predicts when.

    Args:
        horizon: `activation_loading_horizon`: over how many of this rank's next pipeline actions loads may reach,
            besides the rest of the current one; None: no bound. Within it the lead decides, and without a pipeline,
            which has no actions, the lead alone.
    """

    def __init__(self, horizon: int | None = None) -> None:
        self.horizon = horizon
        self.gone: deque[int] = deque()
        """Calls whose graphs have ended. They do so at any time in any thread: appending to a deque needs no lock."""
        self._actions: Sequence[Action] = ()
        self._position = -1
        self._task: _Task | None = None
        self._num_done = 0
        """Calls of the current forward so far."""
        self._num_calls: defaultdict[int, int] = defaultdict(int)
        """How many calls a forward of each segment makes, as far as one has run."""
        self._calls: dict[_Task, list[int]] = {}
        self._waiting: dict[int, None] = {}
        """All calls whose backward is to come, in the order of forward."""
        self._count = 0
        self._last_used: int | None = None

    @property
    def is_planned(self) -> bool:
        """Whether there are actions to predict from."""
        return bool(self._actions)

    # --- what has happened -------------------------------------------------------------------------------------------

    def follow(self, actions: Sequence[Action]) -> None:
        """Predict from these actions of this rank, starting with the first; without any, from what forward did."""
        self._actions, self._position = actions, -1

    def begin(self, kind: Kind, segment: int, microbatch: int) -> None:
        """Note that an action begins."""
        if self._task is not None and self._num_done:
            self._num_calls[self._task[0]] = self._num_done
        self._task, self._num_done = (segment, microbatch), 0
        try:
            self._position = self._actions.index(Action(kind, segment, microbatch), self._position + 1)
        except ValueError:  # the step has diverged from its plan, which predicts nothing any more
            self._actions = ()

    def end(self) -> None:
        """Note that the step is over; its graphs may outlive it."""
        self._forget_gone()
        self._actions, self._position, self._task, self._num_done = (), -1, None, 0
        self._calls = {task: live for task, calls in self._calls.items() if (live := list(self._still(calls)))}

    def add(self) -> int:
        """Return the number of a new call, which belongs to the current forward."""
        self._forget_gone()
        index = self._count
        self._count += 1
        self._waiting[index] = None
        self._last_used = None  # forward goes on, so the next backward starts anew
        if self._task is not None:
            self._calls.setdefault(self._task, []).append(index)
            self._num_done += 1
        return index

    def begin_backward(self, index: int) -> None:
        """Note that the backward of a call begins."""
        self._forget_gone()
        self._last_used = index
        self._waiting.pop(index, None)

    def _forget_gone(self) -> None:
        while self.gone:
            self._waiting.pop(self.gone.popleft(), None)

    # --- what comes next ---------------------------------------------------------------------------------------------

    def is_recent(self, index: int, count: int) -> bool:
        """Return whether a call is among the last `count` of forward."""
        return index > self._count - 1 - count

    def upcoming(self, lead: int) -> list[int]:
        """Return the calls that backward comes to within `lead` layers, the next one first."""
        if self._actions:
            return list(self._planned(lead))
        if self._last_used is None:
            return []
        last = self._last_used
        return list(islice((index for index in reversed(self._waiting) if index < last), lead))

    def is_needed_within(self, lead: int) -> bool:
        """Return whether the plan comes to the latest call again within `lead` layers."""
        return self._count - 1 in self._planned(lead)

    def _planned(self, lead: int) -> Iterator[int]:
        """Yield the calls of backwards that the horizon reaches, up to a distance of `lead`.

        The distance of a call is how many layers this rank computes from now until its backward, which counts, too: in
        a forward those that it has still to call, as many as the segment had last time; in a backward one after the
        other, the last one first.
        """
        distance, current = 0, self._position
        stop = len(self._actions)
        if self.horizon is not None:
            stop = min(stop, current + 1 + self.horizon)
        for position in range(max(0, current), stop):
            action = self._actions[position]
            if action.kind is Kind.FORWARD:
                num_done = self._num_done if position == current else 0
                distance += max(0, self._num_calls[action.segment] - num_done)
            elif action.kind is Kind.BACKWARD:  # the weight half of a split backward needs nothing back
                task = (action.segment, action.microbatch)
                calls = self._calls.get(task, [])
                if task == self._task or not calls:  # calls that its forward has still to make come back first
                    distance += max(0, self._num_calls[action.segment] - len(calls))
                for index in self._still(reversed(calls)):
                    distance += 1
                    if distance > lead:
                        return
                    yield index
            if distance >= lead:
                return

    def _still(self, calls: Iterable[int]) -> Iterator[int]:
        return (index for index in calls if index in self._waiting)


class LeadTuner:
    """Keeps the lead: a number of layers, or with "auto" the least that would have spared the last step its stalls."""

    def __init__(self, link: Link, lead: Lead) -> None:
        self._link, self._learns = link, lead == "auto"
        self.lead = _INITIAL_LEAD if lead == "auto" else lead
        self._layers: list[tuple[Any, int]] = []
        """A stamp at the beginning of each forward and backward of a layer, and the bytes that it needs back."""
        self._last: list[tuple[Any, int]] = []

    def begin_layer(self, load_bytes: int) -> None:
        """Note that a layer begins, and how many bytes it needs back."""
        if self._learns:
            self._layers.append((self._link.stamp(), load_bytes))

    def end_step(self, stall_seconds: float) -> None:
        """Adapt the lead to the times of a completed step."""
        # A device that runs behind this thread may not have finished this step: use the one before.
        layers, self._last, self._layers = self._last, self._layers, []
        if not self._link.runs_ahead:
            layers, self._last = self._last, []
        seconds = [self._link.seconds_between(one, other) for (one, _), (other, _) in pairwise(layers)]
        if not seconds or None in seconds:
            return
        # Which layer stalled is not asked: layers are alike, and the lead is one number for all of them.
        compute = [max(0.0, took - stall_seconds / len(seconds)) for took in seconds if took is not None]
        link = self._link
        loads = [
            link.latency_seconds + num_bytes / link.back_bytes_per_second if num_bytes else 0.0
            for _, num_bytes in layers
        ]
        # The last layer has no successor and hence no duration; count its load all the same, it is the most urgent.
        needed = auto_lead([*compute, 0.0], loads)
        self.lead = max(needed, self.lead - 1)  # shrink slowly: one quiet step proves little
