"""The log of a run as files in its folder: one for each rank, and one of everything as it was shown.

They are for reading only: a disk that is full, or a folder that is gone, ends them with a word, never the run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO, Final

from smpkit.observe.runs import LOGS

__all__ = ["LogFiles"]

_MERGED: Final = "launcher"


class LogFiles:
    """Appends lines to the files of one host's ranks.

    Args:
        run: the folder of the run.
        host: of another host than the first, to name its file of everything after it.
    """

    def __init__(self, run: Path, host: str = "") -> None:
        self._folder = run / LOGS
        self._merged = f"{_MERGED}-{host}" if host else _MERGED
        self._files: dict[str, BinaryIO] = {}
        self._broken = False

    def rank_line(self, rank: int, text: str) -> None:
        """Add a line that a rank printed."""
        self._write(f"rank-{rank}", text)
        self._write(self._merged, f"[rank {rank}] {text}")

    def own_line(self, text: str) -> None:
        """Add what the launcher says itself."""
        self._write(self._merged, text)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, text: str) -> None:
        if self._broken:
            return
        try:
            file = self._files.get(name)
            if file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                # Unbuffered: what a job printed before the machine went down is there.
                file = self._files[name] = (self._folder / f"{name}.log").open("ab", buffering=0)
            file.write(text.encode("utf-8", errors="replace") + b"\n")
        except OSError as error:
            self._broken = True
            sys.stderr.write(f"warning: the log files end here: {error}\n")
