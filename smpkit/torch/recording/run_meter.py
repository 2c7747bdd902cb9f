"""Sum up a rank's training steps for the block at the end of a run: how many, how long, and where their time went.

The average step is timed by the clock at the start of the first one and at the start of the last. What happens inside
is taken from the steps that are recorded, which are few (`Sampling`), so that the sum costs next to nothing.

A step lasts from the start of its call to the start of the next one that trains: what a script does in between, the
optimizer above all, is part of it. So the parts of a step add up to the time that it took.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from smpkit.observe.summary import Split

STALL: Final = "wait for the activation of "
"""How the names of those work spans begin that are stalls of offloading."""

WARM_UP: Final = 2
"""Steps that are left out of averages where there are more than twice as many: the first ones plan and allocate."""
_FIRST: Final = 20
_EVERY: Final = 50
_SPARSER_AFTER: Final = 100  # recorded ones


@dataclass
class Sampling:
    """Which steps are recorded: the first ones, then every 50th, from the 5000th on every 500th, and so on.

    Each step function has its own count; all ranks call the same ones, and so record the same steps.

    Args:
        first: how many of the first; 0: none at all.
    """

    first: int = _FIRST
    _calls: Counter[str] = field(default_factory=Counter)
    """By step function."""

    def next(self, name: str) -> bool:
        """Tell whether the next call of this step function is recorded."""
        number = self._calls[name]
        self._calls[name] = number + 1
        every = _EVERY
        while number >= every * _SPARSER_AFTER:
            every *= 10
        return number < self.first or (self.first > 0 and number % every == 0)

    def latest(self, name: str) -> int:
        """Return the number of this step function's latest call, from 0."""
        return self._calls[name] - 1


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
    messages: Sequence[tuple[str, int, int]],
    works: Sequence[tuple[str, int, int]],
    *,
    is_pipeline: bool,
) -> StepParts:
    """Divide one step, given the begin and the end of its actions, messages (with directions) and works (with names).

    Waiting for a message is bubble: a rank alone cannot tell how long it was under way. Over a pipeline so is what is
    left at the end, when this rank has no more to do and others have.
    """
    ran = sum([end - start for start, end in actions])
    bubble = sum([end - start for direction, start, end in messages if direction == "receive"])
    handed = sum([end - start for direction, start, end in messages if direction != "receive"])
    stall = sum([end - start for name, start, end in works if name.startswith(STALL)])
    worked = sum([end - start for name, start, end in works if not name.startswith(STALL)])
    in_actions = [(start, end) for _, start, end in works if any(a <= start and end <= b for a, b in actions)]
    inside = sum([end - start for start, end in in_actions])
    compute = max(0, ran - bubble - handed - inside)
    rest = max(0, end_ns - start_ns - compute - bubble - handed - stall - worked)
    return StepParts(compute, bubble + (rest if is_pipeline else 0), handed + worked, stall, 0 if is_pipeline else rest)


class RunMeter:
    """Sums up the training steps of this rank."""

    def __init__(self) -> None:
        self.started = time.time()
        """Seconds since 1970."""
        self.num_steps = 0
        """Training steps so far."""
        self._begins_ns: list[int] = []
        """Of the first steps, up to the first one after the warm-up."""
        self._begin_ns = 0
        """Of the latest step."""
        self._end_ns = 0
        """Of the latest step, or of its optimizer."""
        self._sums: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        """Over the recorded ones of the first steps, and of the others: how many, and their times in nanoseconds."""
        self._is_recorded = False
        """Whether the latest step was."""

    def add_step(self, start_ns: int, end_ns: int, parts: StepParts | None, size: tuple[int, int] = (0, 0)) -> None:
        """Add a training step.

        Args:
            start_ns, end_ns: of the call; the end is only that of the host's part where the device has work left.
            parts: of a recorded step, whose end is the device's.
            size: of a recorded step's batch on this rank, in samples and tokens; 0 if unknown.
        """
        self.num_steps += 1
        if self.num_steps <= WARM_UP + 1:
            self._begins_ns.append(start_ns)
        self._begin_ns, self._end_ns, self._is_recorded = start_ns, end_ns, parts is not None
        if parts is not None:
            samples, tokens = size
            self._latest().update(steps=1, call=end_ns - start_ns, samples=samples, tokens=tokens, **vars(parts))

    def add_optimizer(self, start_ns: int, end_ns: int) -> None:
        """Add the time of the optimizer after the latest step."""
        if self.num_steps:
            self._end_ns = end_ns
            if self._is_recorded:
                self._latest().update(optimizer=end_ns - start_ns)

    def _latest(self) -> Counter[str]:
        return self._sums[self.num_steps > WARM_UP]

    # --- results ------------------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes on average, in seconds; None before the first one has ended."""
        if not self.num_steps:
            return None
        if self.num_steps < 2 * WARM_UP:
            return max(1, self._end_ns - self._begins_ns[0]) / self.num_steps * 1e-9
        # The last one is left out: of what follows it, such as the loading of a batch, nothing is known yet.
        return max(1, self._begin_ns - self._begins_ns[WARM_UP]) / (self.num_steps - WARM_UP - 1) * 1e-9

    def size(self) -> tuple[float, float]:
        """Return how many samples and tokens this rank takes in a step on average; 0 if unknown.

        Batches differ: the last one of a data set is often smaller, and texts have any length.
        """
        sums = self._averaged()
        return sums["samples"] / max(1, sums["steps"]), sums["tokens"] / max(1, sums["steps"])

    def _averaged(self) -> Counter[str]:
        """Return the sums over the recorded steps of which averages are taken."""
        first, rest = self._sums
        return rest if self.num_steps >= 2 * WARM_UP and rest else first + rest

    def split(self) -> Split:
        """Divide the average step, as the recorded ones were; nothing before the first one."""
        whole = self.step_seconds
        if whole is None:
            return Split()
        sums = self._averaged()
        # A recorded step waits for the device, and so may take longer than the average one.
        seconds = 1e-9 / max(1, sums["steps"])
        seconds *= min(1.0, whole / max(1e-9, seconds * (sums["call"] + sums["optimizer"])))
        parts = {name: sums[name] * seconds for name in ("compute", "bubble", "communication", "stall", "optimizer")}
        return Split(**parts, other=max(0.0, whole - sum(parts.values())))
