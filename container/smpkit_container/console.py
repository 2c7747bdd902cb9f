"""Show the ranks' output: whole lines with the rank before them, and progress updates without flooding a log.

What others wrote (ranks, other hosts, torchrun) is shown with its colours, and with all other control characters
escaped: printed data must not set a terminal's title, clipboard or cursor.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import BinaryIO, Protocol

from smpkit.config.words import coloured, plain
from smpkit_container.lines import Piece
from smpkit_container.log_files import LogFiles

__all__ = ["Console"]

_PROGRESS_SECONDS = 10.0
"""In a log, a rank's progress bar gives at most one line in this time."""

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)
_CLEAR_LINE = b"\r\x1b[K"


class Stream(Protocol):
    """What is used of a binary stream."""

    def write(self, data: bytes, /) -> int:
        """Write."""

    def flush(self) -> None:
        """Write out what is buffered."""

    def fileno(self) -> int:
        """The file below."""


class _Stamped:
    """Writes lines with their time before them, so that the logs of several nodes can be merged."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        """Write whole lines."""
        stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()
        return self._stream.write(b"".join(stamp + line for line in data.splitlines(keepends=True)))

    def flush(self) -> None:
        """Write out what is buffered."""
        self._stream.flush()

    def fileno(self) -> int:
        """The file below."""
        return self._stream.fileno()


class Console:
    """Writes to a pair of streams; on a terminal, the last progress update stays on the bottom line."""

    def __init__(
        self,
        out: Stream,
        err: Stream,
        *,
        terminal: bool,
        colour: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = {"out": out, "err": err}
        self._terminal = terminal
        self._colour = colour
        self._clock = clock
        self._status = ""
        self._status_rank = -1
        self._last_progress: dict[int, float] = {}
        self.files: LogFiles | None = None
        """Where lines are kept, too."""
        self.broken = False
        """Whether nobody reads the output any more."""

    @classmethod
    def of_process(cls, environ: Mapping[str, str]) -> Console:
        """Return the console of this process's own stdout and stderr."""
        terminal = sys.stdout.isatty() and sys.stderr.isatty() and environ.get("TERM") != "dumb"
        colour = terminal and not environ.get("NO_COLOR")
        out, err = sys.stdout.buffer, sys.stderr.buffer
        if environ.get("SMPKIT_LOG_TIMES") == "1":
            return cls(_Stamped(out), _Stamped(err), terminal=False, colour=False)
        return cls(out, err, terminal=terminal, colour=colour)

    @property
    def is_terminal(self) -> bool:
        return self._terminal

    def show(self, rank: int, stream: str, piece: Piece) -> None:
        """Show one piece of a rank's output."""
        if not piece.passing:
            if self._status_rank == rank:
                self.clear()  # the progress bar ended, or its rank printed something else
            if self.files is not None:
                self.files.rank_line(rank, piece.text)
            self._print(stream, f"{self._prefix(rank)}{coloured(piece.text)}")
        elif self._terminal:
            self._set_status(f"[rank {rank}] {plain(piece.text)}")
            self._status_rank = rank
        elif self._progress_is_due(rank):
            self._print(stream, f"{self._prefix(rank)}{coloured(piece.text)}")

    def live(self, text: str) -> None:
        """Say how the run goes: on a terminal in the bottom line, unless a rank's progress bar is there."""
        if not self._terminal:
            self.say(text)
        elif self._status_rank < 0 or not self._status:
            self._set_status(text)
            self._status_rank = -1

    def say(self, text: str) -> None:
        """Print words of the launcher itself, on stderr; some quote what a rank or another host said."""
        if self.files is not None:
            self.files.own_line(text)
        self._print("err", "\n".join(map(coloured, text.split("\n"))))

    def clear(self) -> None:
        """Take the progress update off the terminal."""
        self._set_status("")

    def _print(self, stream: str, text: str) -> None:
        status, line = self._status, text.encode("utf-8", errors="replace") + b"\n"
        if status:
            self._write("err", _CLEAR_LINE)
        self._write(stream, line)
        if status:
            self._write("err", status.encode("utf-8", errors="replace"))

    def _set_status(self, text: str) -> None:
        """Replace the bottom line; it is cut to the width, because only one line can be overwritten."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if text != self._status:
            self._write("err", _CLEAR_LINE + text.encode("utf-8", errors="replace"))
            self._status = text

    def _write(self, stream: str, data: bytes) -> None:
        if self.broken:
            return
        try:
            self._streams[stream].write(data)
            self._streams[stream].flush()
        except (BrokenPipeError, ConnectionResetError):
            self.broken = True
            # Python flushes stdout again at exit, and would report the error again: discard it.
            with open(os.devnull, "wb") as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), self._streams[stream].fileno())

    def _progress_is_due(self, rank: int) -> bool:
        now = self._clock()
        due = now - self._last_progress.setdefault(rank, now) >= _PROGRESS_SECONDS
        if due:
            self._last_progress[rank] = now
        return due

    def _prefix(self, rank: int) -> str:
        plain = f"[rank {rank}] "
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{plain}\x1b[0m" if self._colour else plain
