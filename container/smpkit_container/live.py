"""Say how a run goes while it does: one line that changes on a terminal, lines at growing intervals in a log.

What ranks do is read from their status pages; those of a script that does not use smpkit have none, and it is left
alone once it has printed something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from smpkit.config.words import duration
from smpkit.observe.status import RankStatus, read_status
from smpkit.units import amount, count

__all__ = ["Live", "line_of"]

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
        self._count = 0
        self._first: tuple[float, int] | None = None
        """When the first step that was seen ran, and its number."""
        self.due = self._began + (_TERMINAL_SECONDS if terminal else _LOG_SECONDS[0])
        """When the next line is due, by the clock."""

    def next_line(self, num_started: int, *, has_output: bool) -> str | None:
        """Return the line if it is due, and there is something to say."""
        now = self._clock()
        if now < self.due:
            return None
        self._count += 1
        self.due = now + _TERMINAL_SECONDS if self._terminal else self._began + self._next_in_log(now - self._began)
        pages = [read_status(self._folder, rank) for rank in self._ranks]
        known = [page for page in pages if page is not None]
        if not known and has_output:
            return None
        step = min((page.step for page in known), default=-1)
        if step >= 0 and self._first is None:
            self._first = (now, step)
        rate = 0.0
        if self._first is not None and step > self._first[1]:
            rate = (step - self._first[1]) / max(1e-9, now - self._first[0])
        return line_of(len(self._ranks), num_started, known, rate, now - self._began)

    def _next_in_log(self, seconds: float) -> float:
        return next((due for due in _LOG_SECONDS if due > seconds), seconds * 1.5)


def line_of(num_ranks: int, num_started: int, known: Sequence[RankStatus], steps_per_s: float, seconds: float) -> str:
    """Return the line.

    Args:
        known: pages of the ranks that have one, so have called `smp.init`.
        steps_per_s: 0 where not known yet.
    """
    after = f" ({duration(seconds)})"
    if num_started < num_ranks:
        return f"starting ranks: {num_started} of {num_ranks} up{after}"
    step = min((page.step for page in known), default=-1)
    if len(known) < num_ranks:
        ready = f", {len(known)} ready" if known else ""
        return f"{num_ranks} rank{'s' * (num_ranks != 1)} up, importing{ready}{after}"
    if step < 0:
        return f"{num_ranks} rank{'s' * (num_ranks != 1)} ready, no step yet{after}"
    if step == 0:
        return f"step 0, the first one: it traces and plans{after}"
    held = max((page.held.on_device for page in known if page.held is not None), default=0)
    parts = [f"step {step:,}"]
    if steps_per_s:
        parts.append(f"{count(steps_per_s)} steps/s")
    if held:
        parts.append(f"{amount(held)} on the fullest rank")
    return ", ".join(parts) + after
