"""When receives are posted, ahead of the actions that need their values.

A backend such as gloo sends data only once the receive is posted, so a rank posts those of its next actions early.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

__all__ = ["LOOKAHEAD", "num_ahead"]

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
