"""Say how a run goes while it does: one line that changes on a terminal, lines at growing intervals in a log.

What ranks do is read from their status pages; those of a script that does not use smpkit have none, and it is left
alone once it has printed something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from smpkit.config.words import duration
from smpkit.observe.status import RankStatus, read_status
from smpkit.units import amount, seconds

_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = (15.0, 45.0, 120.0, 300.0, 600.0)
"""When lines come in a log, since the start; then every time after half as long again."""


class Live:
    """The state of the line of one host.

    Args:
        folder: where its ranks' pages are.
        ranks: those that are expected.
        terminal: whether the line changes in place.
    """

    def __init__(
        self, folder: Path, ranks: range, *, terminal: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._terminal = terminal
        self._clock = clock
        self._began = clock()
        self.due = self._began + (_TERMINAL_SECONDS if terminal else _LOG_SECONDS[0])
        """When the next line is due, by the clock."""

    def next_line(self, num_started: int, *, has_output: bool) -> str | None:
        """Return the line if it is due, and there is something to say."""
        now = self._clock()
        if now < self.due:
            return None
        self.due = now + _TERMINAL_SECONDS if self._terminal else self._began + self._next_in_log(now - self._began)
        pages = {rank: read_status(self._folder, rank) for rank in self._ranks}
        known = {rank: page for rank, page in pages.items() if page is not None}
        if not known and has_output:
            return None
        return line_of(self._ranks, num_started, known, now - self._began)

    def _next_in_log(self, seconds: float) -> float:
        return next((due for due in _LOG_SECONDS if due > seconds), seconds * 1.5)


def line_of(ranks: Sequence[int], num_started: int, known: Mapping[int, RankStatus], elapsed: float) -> str:
    """Return the line; its figures are measured by the ranks, as those of the block at the end of the run.

    Args:
        known: the pages of the ranks that have called `smp.init`.
    """
    num_ranks, after = len(ranks), f" ({duration(elapsed)})"
    if num_started < num_ranks:
        return f"starting ranks: {num_started} of {num_ranks} up{after}"
    step = min((page.step for page in known.values()), default=-1)
    if len(known) < num_ranks:
        ready = f", {len(known)} ready" if known else ""
        return f"{num_ranks} rank{'s' * (num_ranks != 1)} up, importing{ready}{after}"
    if step < 0:
        return f"{num_ranks} rank{'s' * (num_ranks != 1)} ready, no step yet{after}"
    if step == 0:
        return f"step 0, the first one: it traces and plans{after}"
    # Steps that train, as in the block at the end: evaluations would be counted in `step`, too.
    trained = min(page.num_trained for page in known.values())
    length = max(page.step_seconds for page in known.values())
    parts = [f"{trained:,} steps of {seconds(length)}" if trained and length else f"step {step:,}"]
    held, rank = max((page.held.on_device if page.held else 0, -rank) for rank, page in known.items())
    if held:
        parts.append(f"peak memory {amount(held)} (rank {-rank})" if num_ranks > 1 else f"peak memory {amount(held)}")
    return ", ".join(parts) + after
