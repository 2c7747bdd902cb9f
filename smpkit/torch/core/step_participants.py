"""The parts of a model that take part in its steps, and their one order around the engine (`Pipeline` or `OneStage`).

::

    begin_step          in the order of the list
        engine.run      for each microbatch begin_microbatch, forward, before_backward, backward
    end_step            in reverse, as `with` blocks end; after an exception `abandon_step` instead, the engine first

A part overrides the phases that it needs. `smpkit.torch.step` drives whole steps; a forward and backward outside any
step has the phases with `outside_step` in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smpkit.torch.core.microbatches import StepProgress


class StepParticipant:
    """A part of a model that takes part in its steps."""

    def begin_step(self, step: StepProgress) -> None:
        """Prepare for the microbatches of a step."""

    def begin_microbatch(self, index: int) -> None:
        """Note which microbatch runs; over several pipeline ranks, the executor's actions tell that instead."""

    def before_backward(self, step: StepProgress) -> None:
        """Prepare for a backward that the script runs itself, as it does without a pipeline."""

    def before_last_backward(self) -> None:
        """Prepare for the last backward of the step, where a schedule says which one that is."""

    def end_step(self, step: StepProgress) -> None:
        """Finish a step whose microbatches are done."""

    def abandon_step(self, error: BaseException) -> None:
        """Clean up after a step, or a backward outside any, that an exception ended."""

    def begin_outside_step(self, training: bool) -> None:
        """Prepare for a forward outside any step, and perhaps its backward."""

    def abandon_forward_outside_step(self) -> None:
        """Clean up after a forward outside any step that an exception ended."""


class StepParticipants:
    """The parts of one model, in order.

    Each phase is a tuple of the methods of those parts that override it: what a part does not need costs nothing.
    """

    def __init__(self) -> None:
        self._parts: list[StepParticipant] = []
        self._collect()

    def add(self, part: StepParticipant) -> None:
        self._parts.append(part)
        self._collect()

    def remove(self, part: StepParticipant) -> None:
        """Leave out a part that has nothing more to do, from the next phase on."""
        self._parts.remove(part)
        self._collect()

    def _collect(self) -> None:
        self.begin_step: Sequence[Callable[[StepProgress], None]] = self._methods("begin_step")
        self.begin_microbatch: Sequence[Callable[[int], None]] = self._methods("begin_microbatch")
        self.before_backward: Sequence[Callable[[StepProgress], None]] = self._methods("before_backward")
        self.before_last_backward: Sequence[Callable[[], None]] = self._methods("before_last_backward")
        self.end_step: Sequence[Callable[[StepProgress], None]] = self._methods("end_step")[::-1]
        self.abandon_step: Sequence[Callable[[BaseException], None]] = self._methods("abandon_step")[::-1]
        self.begin_outside_step: Sequence[Callable[[bool], None]] = self._methods("begin_outside_step")
        self.abandon_forward_outside_step: Sequence[Callable[[], None]] = self._methods("abandon_forward_outside_step")

    def _methods(self, phase: str) -> tuple[Callable[..., None], ...]:
        unused = getattr(StepParticipant, phase)
        return tuple(getattr(part, phase) for part in self._parts if getattr(type(part), phase) is not unused)
