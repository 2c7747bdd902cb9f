"""One call of a step function, while it runs: which microbatch, and how many backwards are still to come."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepProgress"]


@dataclass
class StepProgress:
    """One call of a step function, while it runs.

    `backwards` counts the calls of `model.backward` in the current microbatch. `expected_backwards` is how many a
    microbatch of this function makes (learnt from the one before), so that the last one is known when it comes and
    gradients can be reduced while it runs.
    """

    num_microbatches: int
    microbatch: int = 0
    backwards: int = 0
    total_backwards: int = 0
    expected_backwards: int | None = None

    @property
    def is_last_backward(self) -> bool:
        last_microbatch = self.microbatch == self.num_microbatches - 1
        return last_microbatch and self.backwards + 1 == self.expected_backwards

    def end_microbatch(self) -> None:
        self.expected_backwards = self.backwards
        self.total_backwards += self.backwards
        self.backwards = 0
