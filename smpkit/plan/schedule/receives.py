"""When receives are posted, ahead of the actions that need their values, and what memory they take until then.

A backend such as gloo sends data only once the receive is posted, so a rank posts those of its next actions early. The
runtime follows these rules, and `smpkit plan` counts with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from smpkit.plan.schedule.actions import Schedule
from smpkit.plan.schedule.graph import Kind, Segment

__all__ = ["LOOKAHEAD", "num_ahead", "posted_bytes"]

LOOKAHEAD: Final = 2
"""For how many of the actions after the current one receives are posted."""
_AHEAD_BYTES: Final = 1 << 20
"""Bytes of receives that are posted before the first wait."""


def num_ahead(received_bytes: Sequence[int]) -> int:
    """Return for how many of a rank's first actions receives are posted before its first wait.

    Args:
        received_bytes: of each action of the rank, in order.
    """
    return max(1, sum(num_bytes <= _AHEAD_BYTES for num_bytes in accumulate(received_bytes)))


def posted_bytes(schedule: Schedule) -> list[int]:
    """Return for each rank the most that it holds at a time for values which no forward has taken yet."""
    found = []
    for rank, actions in enumerate(schedule.actions):
        sizes = [_received_bytes(schedule, action.kind, Segment(rank, action.segment)) for action in actions]
        first = num_ahead(sizes)
        peak = 0
        for index, action in enumerate(actions):
            begin = index if action.kind is Kind.BACKWARD else index + 1  # a forward's are activations by now
            peak = max(peak, sum(sizes[begin : max(first, index + 1 + LOOKAHEAD)]))
        found.append(peak)
    return found


def _received_bytes(schedule: Schedule, kind: Kind, segment: Segment) -> int:
    """Return what an action of a segment receives from other ranks."""
    if kind is Kind.WEIGHT:
        return 0
    return sum(
        each.num_bytes
        for each in schedule.graph.transfers
        if each.is_message
        and (each.target == segment if kind is Kind.FORWARD else each.source == segment and each.differentiable)
    )
