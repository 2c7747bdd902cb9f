"""Sum up a rank's training steps for the block at the end of a run: how many, how long, and where their time went.

Each step is timed by two readings of the clock. What happens inside is taken from the steps that are recorded, which
are few (`Sampling`), so that the sum costs next to nothing; and scaled to the average step.

A step lasts from the begin of its call to the begin of the next one that trains: what a script does in between, the
optimizer above all, is part of it. So the parts of a step add up to the time that it took.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from smpkit.observe.summary import Split

__all__ = ["STALL", "WARM_UP", "RunMeter", "Sampling", "StepParts", "parts_of"]

STALL: Final = "wait for the activation of "
"""How the names of those work spans begin that are stalls of offloading."""

WARM_UP: Final = 2
"""Steps that are left out of averages where there are more than twice as many: the first ones plan and allocate."""
_FIRST: Final = 20
_EVERY: Final = 50
_TENFOLD_FROM: Final = 5000
_UNSETTLED: Final = 3 * 256
"""How many times are kept before they are added up, three for each step."""


@dataclass
class Sampling:
    """Which steps are recorded: the first ones, then every 50th, from the 5000th on every 500th, and so on.

    Each step function has its own count; all ranks call the same ones, and so record the same steps.

    Args:
        first: how many of the first; 0: none at all.
    """

    first: int = _FIRST
    _left: dict[str, int] = field(default_factory=dict)
    """By step function, how many calls come before the next one that is recorded."""
    _next: dict[str, int] = field(default_factory=dict)
    """Its number."""

    def next(self, name: str) -> bool:
        """Tell whether the next call of this step function is recorded."""
        left = self._left.get(name, 0)
        if left:
            self._left[name] = left - 1
            return False
        if not self.first:
            return False
        number = self._next.get(name, 0)
        following = number + 1
        if following >= self.first:
            every, limit = _EVERY, _TENFOLD_FROM
            while following >= limit:
                every, limit = every * 10, limit * 10
            following += -following % every
        self._next[name], self._left[name] = following, following - number - 1
        return True


@dataclass(frozen=True)
class StepParts:
    """Where the time of one recorded step went, in nanoseconds."""

    compute: int
    bubble: int
    communication: int
    stall: int
    other: int


def parts_of(
    start_ns: int,
    end_ns: int,
    actions: Sequence[tuple[int, int]],
    messages: Iterable[tuple[str, int, int]],
    works: Iterable[tuple[str, int, int]],
    *,
    is_pipeline: bool,
) -> StepParts:
    """Divide one step.

    Args:
        start_ns, end_ns: of the step.
        actions: begin and end of each.
        messages: the direction of each, its begin and its end.
        works: the name of each, its begin and its end.

    Waiting for a message is bubble: a rank alone cannot tell how long it was under way. Over a pipeline so is what is
    left at the end, when this rank has no more to do and others have.
    """
    ran = sum([end - start for start, end in actions])
    bubble = handed = stall = worked = inside = 0
    for direction, start, end in messages:
        if direction == "receive":
            bubble += end - start
        else:
            handed += end - start
    for name, begun, ended in works:
        if name.startswith(STALL):
            stall += ended - begun
        else:
            worked += ended - begun
        if any(start <= begun and ended <= end for start, end in actions):
            inside += ended - begun
    compute = max(0, ran - bubble - handed - inside)
    rest = max(0, end_ns - start_ns - compute - bubble - handed - stall - worked)
    return StepParts(compute, bubble + (rest if is_pipeline else 0), handed + worked, stall, 0 if is_pipeline else rest)


@dataclass
class _Sums:
    """Sums over training steps."""

    steps: int = 0
    whole: int = 0
    """From begin to begin, in nanoseconds."""
    call: int = 0
    """Of the step function."""
    optimizer: int = 0

    def add(self, steps: int, whole: int, call: int, optimizer: int) -> None:
        self.steps += steps
        self.whole += whole
        self.call += call
        self.optimizer += optimizer

    def __add__(self, other: _Sums) -> _Sums:
        pairs = ((getattr(self, name), getattr(other, name)) for name in _Sums.__dataclass_fields__)
        return _Sums(*(one + two for one, two in pairs))


@dataclass
class _Group:
    """Steps that are averaged together."""

    all: _Sums = field(default_factory=_Sums)
    recorded: _Sums = field(default_factory=_Sums)
    parts: list[StepParts] = field(default_factory=list)
    """Of the recorded ones."""


class RunMeter:
    """Sums up the steps of this rank.

    Args:
        is_exact: the host's clock times the work, as it does without a GPU; else only recorded steps, which wait for
            the device, say how long calls took.
    """

    def __init__(self, *, is_exact: bool) -> None:
        self.started = time.time()
        """Seconds since 1970."""
        self.num_steps = 0
        """Training steps so far."""
        self.samples = 0
        """In a step of this rank, as of the last one that was recorded; 0 if unknown."""
        self.tokens = 0
        self.is_exact = is_exact
        self._start, self._rest = _Group(), _Group()
        self._times: list[int] = []
        """The latest steps, which `_settle` adds up: of each its begin, its end, and the time of its optimizer."""
        self._parts: dict[int, StepParts] = {}
        """By number, from 1, those among them that were recorded."""
        self._last_ns = 0
        """The end of the latest step, or of its optimizer."""

    def add_step(self, start_ns: int, end_ns: int, parts: StepParts | None) -> None:
        """Add a training step.

        Args:
            start_ns, end_ns: of the call; the end is only that of the host's part where the device has work left.
            parts: of a recorded step, whose end is the device's.
        """
        self.num_steps += 1
        times = self._times
        times += (start_ns, end_ns, 0)
        self._last_ns = end_ns
        if parts is not None:
            self._parts[self.num_steps] = parts
        if len(times) > _UNSETTLED:
            self._settle()

    def add_optimizer(self, start_ns: int, end_ns: int) -> None:
        """Add the time of the optimizer after the latest step."""
        if self._times:
            self._times[-1] += end_ns - start_ns
            self._last_ns = end_ns

    def finish(self, end_ns: int | None = None) -> None:
        """Close the last step, at a time or where its optimizer ended."""
        self._settle(self._last_ns if end_ns is None else end_ns)

    def _settle(self, end_ns: int | None = None) -> None:
        """Add up the latest steps, but the last one only if its end is given: it lasts until the next one begins."""
        times = self._times
        starts, ends, optimizers = times[::3], times[1::3], times[2::3]
        first = self.num_steps - len(starts) + 1
        closed = [*starts[1:], *([] if end_ns is None else [end_ns])][: len(starts)]
        split = max(0, min(len(closed), WARM_UP + 1 - first))
        for group, begin, end in ((self._start, 0, split), (self._rest, split, len(closed))):
            if begin < end:
                call = sum(ends[begin:end]) - sum(starts[begin:end])
                group.all.add(end - begin, closed[end - 1] - starts[begin], call, sum(optimizers[begin:end]))
        for number in [each for each in self._parts if each < first + len(closed)]:
            group, at = self._start if number <= WARM_UP else self._rest, number - first
            group.recorded.add(1, closed[at] - starts[at], ends[at] - starts[at], optimizers[at])
            group.parts.append(self._parts.pop(number))
        del times[: 3 * len(closed)]

    # --- results ------------------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes on average, in seconds; None before the first one has ended."""
        sums = self._settled.all
        return max(1, sums.whole) / sums.steps * 1e-9 if sums.steps else None

    def split(self) -> Split:
        """Divide the average step; nothing before the first one."""
        group = self._settled
        sums = group.all
        if not sums.steps:
            return Split()
        timed = sums if self.is_exact or not group.recorded.steps else group.recorded
        whole, call = max(1, sums.whole) / sums.steps, timed.call / timed.steps
        optimizer = timed.optimizer / timed.steps
        fits = min(1.0, whole / max(1.0, call + optimizer))
        call, optimizer = call * fits, optimizer * fits
        parts = {name: sum(getattr(each, name) for each in group.parts) for name in StepParts.__dataclass_fields__}
        known = sum(parts.values())
        scaled = {name: call * value / known if known else 0.0 for name, value in parts.items()}
        scaled["other"] = whole - optimizer - sum(value for name, value in scaled.items() if name != "other")
        return Split(optimizer=optimizer * 1e-9, **{name: max(0.0, value) * 1e-9 for name, value in scaled.items()})

    @property
    def _settled(self) -> _Group:
        """The steps without those of the start, if there are enough others."""
        self._settle()
        if self._rest.all.steps >= WARM_UP:
            return self._rest
        return _Group(
            self._start.all + self._rest.all,
            self._start.recorded + self._rest.recorded,
            self._start.parts + self._rest.parts,
        )
