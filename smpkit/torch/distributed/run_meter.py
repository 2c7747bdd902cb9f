"""Sum up a rank's training steps for the block at the end of a run: how many, how long, and where their time went.

Each step is timed by two readings of the clock. What happens inside is taken from the steps that are recorded, which
are few (`Sampling`), so that the sum costs next to nothing; and scaled to the average step.

A step lasts from the begin of its call to the begin of the next one that trains: what a script does in between, the
optimizer above all, is part of it. So the parts of a step add up to the time that it took.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from smpkit.observe.events import ActionSpan, MessageSpan, WorkSpan
from smpkit.observe.summary import Split

__all__ = ["STALL", "WARM_UP", "RunMeter", "Sampling", "StepParts", "parts_of"]

STALL: Final = "wait for the activation of "
"""How the names of those work spans begin that are stalls of offloading."""

WARM_UP: Final = 2
"""Steps that are left out of averages where there are more than twice as many: the first ones plan and allocate."""
_FIRST: Final = 20
_EVERY: Final = 50
_TENFOLD_FROM: Final = 5000


@dataclass
class Sampling:
    """Which steps are recorded: the first ones, then every 50th, from the 5000th on every 500th, and so on.

    Each step function has its own count; all ranks call the same ones, and so record the same steps.

    Args:
        first: how many of the first; 0: none at all.
    """

    first: int = _FIRST
    _counts: Counter[str] = field(default_factory=Counter)

    def next(self, name: str) -> bool:
        """Tell whether the next call of this step function is recorded."""
        number = self._counts[name]
        self._counts[name] += 1
        if number < self.first or not self.first:
            return bool(self.first)
        every, limit = _EVERY, _TENFOLD_FROM
        while number >= limit:
            every, limit = every * 10, limit * 10
        return number % every == 0


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
    actions: Iterable[ActionSpan],
    messages: Iterable[MessageSpan],
    works: Iterable[WorkSpan],
    *,
    is_pipeline: bool,
) -> StepParts:
    """Divide one step.

    Waiting for a message is bubble: a rank alone cannot tell how long it was under way. Over a pipeline so is what is
    left at the end, when this rank has no more to do and others have.
    """
    ran = sum(each.end_ns - each.start_ns for each in actions)
    bubble = handed = stall = worked = inside = 0
    for message in messages:
        length = message.end_ns - message.start_ns
        if message.direction == "receive":
            bubble += length
        else:
            handed += length
    spans = [(each.start_ns, each.end_ns) for each in actions]
    for work in works:
        length = work.end_ns - work.start_ns
        if work.name.startswith(STALL):
            stall += length
        else:
            worked += length
        if any(start <= work.start_ns and work.end_ns <= end for start, end in spans):
            inside += length
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

    def add(self, whole: int, call: int, optimizer: int) -> None:
        self.steps += 1
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


@dataclass
class _Step:
    """The latest training step, until the next one begins."""

    start_ns: int
    end_ns: int
    parts: StepParts | None
    optimizer: int = 0
    last_ns: int = 0


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
        self._last: _Step | None = None

    def add_step(self, start_ns: int, end_ns: int, parts: StepParts | None) -> None:
        """Add a training step.

        Args:
            start_ns, end_ns: of the call; the end is only that of the host's part where the device has work left.
            parts: of a recorded step, whose end is the device's.
        """
        self._close(start_ns)
        self.num_steps += 1
        self._last = _Step(start_ns, end_ns, parts, last_ns=end_ns)

    def add_optimizer(self, start_ns: int, end_ns: int) -> None:
        """Add the time of the optimizer after the latest step."""
        if self._last is not None:
            self._last.optimizer += end_ns - start_ns
            self._last.last_ns = end_ns

    def finish(self) -> None:
        """Close the last step, where its optimizer ended."""
        if self._last is not None:
            self._close(self._last.last_ns)

    def _close(self, next_ns: int) -> None:
        step, self._last = self._last, None
        if step is None:
            return
        times = (max(1, next_ns - step.start_ns), step.end_ns - step.start_ns, step.optimizer)
        group = self._start if self.num_steps <= WARM_UP else self._rest
        group.all.add(*times)
        if step.parts is not None:
            group.recorded.add(*times)
            group.parts.append(step.parts)

    # --- results ------------------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes on average; None before the first one."""
        sums = self._settled.all
        return sums.whole / sums.steps * 1e-9 if sums.steps else None

    def split(self) -> Split:
        """Divide the average step; nothing before the first one."""
        group = self._settled
        sums = group.all
        if not sums.steps:
            return Split()
        timed = sums if self.is_exact or not group.recorded.steps else group.recorded
        whole, call = sums.whole / sums.steps, timed.call / timed.steps
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
        if self._rest.all.steps >= WARM_UP:
            return self._rest
        return _Group(
            self._start.all + self._rest.all,
            self._start.recorded + self._rest.recorded,
            self._start.parts + self._rest.parts,
        )
