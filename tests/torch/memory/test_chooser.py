"""When ranks agree on what they have measured: in the same steps, whatever each of them calls and updates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from smpkit.plan.tune.chain import Choice
from smpkit.testing import EmulatedLink
from smpkit.torch.memory.chooser import Chooser
from smpkit.torch.recompute.layer import ChosenCheckpoint


def test_a_rank_that_calls_and_updates_nothing_asks_in_the_same_steps() -> None:
    """Its replicas have updated, and have called a layer that saves 64 bytes and is given 32."""
    step, asked = 0, []

    def agree(numbers: Sequence[float]) -> Sequence[float]:
        asked.append((step, len(numbers)))
        return [1.0] if len(numbers) == 1 else [*numbers[:-4], 2.0, 1.0, 64.0, 32.0]

    layer = ChosenCheckpoint(nn.Linear(2, 2))
    allowed = frozenset({Choice.KEEP, Choice.RECOMPUTE})
    chooser = Chooser(
        {"0": layer}, lambda: (), EmulatedLink(), None, limit_bytes=130, allowed=allowed, agree=agree, live=2
    )
    for step in range(1, 9):
        chooser.begin_step()
        chooser.end_step(had_backward=step != 2)  # it does not count
    assert asked == [(5, 1), (8, 11 + 4)]
    assert chooser.is_done
    assert chooser.choices == {"0": Choice.KEEP}  # two microbatches save 128 bytes
