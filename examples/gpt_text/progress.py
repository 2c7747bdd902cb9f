"""Show how far training is: a bar on a terminal, a line per tenth in a log."""

from __future__ import annotations

import os
import sys


class Progress:
    """Print on one rank only.

    A rank's own output is a pipe; `SMPKIT_TERMINAL` says that the launcher's, at the other end, is a terminal.
    """

    def __init__(self, active: bool, total: int, start: int = 0) -> None:
        self.active, self.total, self.shown = active, total, start
        self.bar = sys.stdout.isatty() or os.environ.get("SMPKIT_TERMINAL") == "1"

    def say(self, text: str) -> None:
        if self.active:
            print(text, flush=True)

    def update(self, step: int, text: str) -> None:
        if not self.active:
            return
        if self.bar:
            filled = 30 * step // self.total
            end = "\n" if step == self.total else "\r"
            print(f"{'━' * filled}{'╌' * (30 - filled)} {step}/{self.total}  {text}", end=end, flush=True)
        elif step == self.total or step - self.shown >= self.total / 10:
            self.shown = step
            print(f"step {step}/{self.total}  {text}", flush=True)
