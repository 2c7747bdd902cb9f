"""Tell a script once, at its own line, what slows its steps down for good: questions for values, and no schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from smpkit.torch.core.warn import ScriptLine, script_line, warn_user

__all__ = ["Departure", "StepHints"]

_HINT_STEP: Final = 3
"""The step in which a script is told. Not in the first ones: it may look at a value once, and look no more."""


@dataclass(frozen=True)
class Departure:
    """Why a microbatch cannot follow a schedule, and where in the script.

    Args:
        why: the beginning of a sentence.
        advice: what to do about it, the rest of a sentence.
        line: None: the end of the step.
    """

    why: str
    advice: str
    line: ScriptLine | None


class StepHints:
    """Counts what is slow in each step of a pipeline, and warns on rank 0, once per job and kind of hint."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.python_values: dict[str, int] = {}
        """How often Python needed a value, by the function that asked."""
        self._num_unscheduled = 0
        self._given: set[str] = set()

    def count_python_value(self, func: Callable[..., Any]) -> None:
        """Count a value that Python needed: each time, all ranks wait for its owner."""
        name = getattr(func, "__name__", str(func))
        self.python_values[name] = self.python_values.get(name, 0) + 1
        if self.num_steps == _HINT_STEP:
            text = (
                f"`{name}` asks for the value of a tensor in each step ({sum(self.python_values.values())} times in "
                f"{_HINT_STEP} steps so far): every pipeline rank waits for the rank that has it. To train faster, "
                "return the tensor from the step and look at it afterwards, or put the code into a torch.nn.Module"
            )
            self._warn("values", text, script_line())

    def count_unscheduled(self, departures: Iterable[Departure | None]) -> None:
        """Count a step in which microbatches have left the schedule, or could not have one."""
        found = next(filter(None, departures), None)
        if found is None:
            return
        self._num_unscheduled += 1
        if self._num_unscheduled == _HINT_STEP:
            text = (
                f"{found.why}, in {_HINT_STEP} steps so far: such steps follow no schedule. Their microbatches run one "
                "after the other, all forwards before all backwards, so activations of all microbatches stay in memory "
                f"(active_microbatches has no effect) and ranks wait for each other. To train faster, {found.advice}"
            )
            self._warn("schedule", text, found.line or script_line())

    def _warn(self, hint: str, text: str, line: ScriptLine) -> None:
        if hint not in self._given:
            self._given.add(hint)
            warn_user(text, line)
