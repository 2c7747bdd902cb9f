"""Show the ranks' output: whole lines with the rank before them, and progress updates without flooding a log.

What others wrote (ranks, other hosts, mpirun) is shown with its colours, and with all other control characters escaped:
printed data must not set a terminal's title, clipboard or cursor.

Between these lines, `Live` says how the run goes. What ranks do is read from their status pages; those of a script that
does not use smpkit have none, and it is left alone once it has printed something.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final
from unicodedata import east_asian_width

from smpkit.config.words import coloured, duration, plain
from smpkit.observe.runs import LOGS
from smpkit.observe.status import RankStatus, read_status
from smpkit.units import amount, seconds, things

_PROGRESS_SECONDS = 10.0
"""In a log, a rank's progress bar gives at most one line in this time."""

_WAIT_SECONDS = 5.0
"""How long a write waits for its reader once the run was asked to stop."""

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)
_CLEAR_LINE = b"\r\x1b[K"


@dataclass(frozen=True)
class Piece:
    """One line of text without its end; a `passing` one is a progress update that the next piece replaces."""

    text: str
    passing: bool = False


class LineSplitter:
    """Cuts bytes into lines, and tells progress updates, ended by a carriage return, from lines.

    Text that is not UTF-8 gets replacement characters. A line longer than `max_bytes` is given out in parts, so that a
    rank that never ends a line cannot fill the memory.
    """

    def __init__(self, max_bytes: int = 4 * 2**20) -> None:
        self._unfinished = b""
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Piece]:
        """Add `data`; return the lines that became whole, and last, if it is one, the present progress update."""
        *ended, rest = data.split(b"\n")
        pieces = []
        for part in ended:
            pieces.append(Piece(_last_version(self._unfinished + part)))
            self._unfinished = b""
        self._unfinished += rest
        if rest and b"\r" in self._unfinished:
            # Forget the versions before this one, but not its carriage return: what follows is an update, too.
            self._unfinished = self._unfinished[max(0, self._unfinished.rstrip(b"\r").rfind(b"\r")) :]
            if text := _last_version(self._unfinished):
                pieces.append(Piece(text, passing=True))
        if len(self._unfinished) > self._max_bytes:
            pieces += self.close()
        return pieces

    def close(self) -> list[Piece]:
        """Return what was left without an end of line."""
        rest, self._unfinished = self._unfinished, b""
        return [Piece(_last_version(rest))] if rest.strip(b"\r") else []


def _last_version(raw: bytes) -> str:
    """Return what a terminal shows of a line that carriage returns have overwritten."""
    visible = raw.rstrip(b"\r").rpartition(b"\r")[2]
    return visible.decode("utf-8", errors="replace")


class Console:
    """Writes to a pair of streams; on a terminal, the last progress update stays on the bottom line.

    Args:
        stamped: whether lines have their time before them, so that the logs of several nodes can be merged.
    """

    def __init__(
        self,
        out: BinaryIO,
        err: BinaryIO,
        *,
        terminal: bool,
        colour: bool,
        stamped: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._streams = {"out": out, "err": err}
        self.is_terminal, self._colour, self._stamped = terminal, colour, stamped
        self._clock = clock
        self._status = ""
        self._status_rank = -1
        self._last_progress: dict[int, float] = {}
        self._logs: Path | None = None
        self._merged_log = ""
        self._files: dict[str, int] = {}
        self.broken = False
        """Whether the output goes nowhere any more: nobody reads it, or its disk is full."""
        self._writing_since = float("inf")

    @classmethod
    def of_process(cls, environ: Mapping[str, str]) -> Console:
        """Return the console of this process's own stdout and stderr."""
        stamped = environ.get("SMPKIT_LOG_TIMES") == "1"
        terminal = sys.stdout.isatty() and sys.stderr.isatty() and environ.get("TERM") != "dumb" and not stamped
        colour = terminal and not environ.get("NO_COLOR")
        return cls(sys.stdout.buffer, sys.stderr.buffer, terminal=terminal, colour=colour, stamped=stamped)

    def keep_logs(self, run: Path, host: str = "") -> None:
        """Keep lines in the folder of a run, too: a file for each rank, and one of everything as it was shown.

        Args:
            host: goes into the name of the file of everything; empty on the first host.
        """
        self._logs = run / LOGS
        self._merged_log = f"launcher-{host}" if host else "launcher"

    def show(self, rank: int, stream: str, piece: Piece) -> None:
        """Show one piece of a rank's output; of progress, a log gets a line now and then."""
        prefix, now = f"[rank {rank}] ", self._clock()
        if self._colour:
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        line = f"{prefix}{coloured(piece.text)}"
        if not piece.passing:
            if self._status_rank == rank:
                self.clear()  # the progress bar ended, or its rank printed something else
            self._keep(f"rank-{rank}", piece.text)
            self._keep(self._merged_log, f"[rank {rank}] {piece.text}")
            self._print(stream, line)
        elif self.is_terminal:
            self._set_status(f"[rank {rank}] {plain(piece.text)}")
            self._status_rank = rank
        elif now - self._last_progress.setdefault(rank, now) >= _PROGRESS_SECONDS:
            self._last_progress[rank] = now
            self._print(stream, line)

    def live(self, text: str) -> None:
        """Say how the run goes: on a terminal in the bottom line, unless a rank's progress bar is there."""
        if not self.is_terminal:
            self.say(text)
        elif self._status_rank < 0 or not self._status:
            self._set_status(text)
            self._status_rank = -1

    def say(self, text: str) -> None:
        """Print words of the launcher itself, on stderr; some quote what a rank or another host said."""
        self._keep(self._merged_log, text)
        self._print("err", "\n".join(map(coloured, text.split("\n"))))

    def clear(self) -> None:
        """Take the progress update off the terminal."""
        self._set_status("")

    def _keep(self, name: str, text: str) -> None:
        """Add a line to a log; a full disk, or a folder that is gone, ends the logs with a word, and never the run."""
        if self._logs is None:
            return
        try:
            if name not in self._files:
                self._logs.mkdir(parents=True, exist_ok=True)
                # Without a buffer: what a job printed before the machine went down is there.
                self._files[name] = os.open(self._logs / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(self._files[name], text.encode("utf-8", errors="replace") + b"\n")
        except OSError as error:
            self._logs = None
            sys.stderr.write(f"warning: the log files end here: {error}\n")

    def _print(self, stream: str, text: str) -> None:
        status, line = self._status, text.encode("utf-8", errors="replace") + b"\n"
        if self._stamped:
            stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ ").encode()
            line = b"".join(stamp + part for part in line.splitlines(keepends=True))
        if status:
            self._write("err", _CLEAR_LINE)
        self._write(stream, line)
        if status:
            self._write("err", status.encode("utf-8", errors="replace"))

    def _set_status(self, text: str) -> None:
        """Replace the bottom line; it is cut to the width, because only one line can be overwritten."""
        ends = accumulate(1 + (east_asian_width(character) in "WF") for character in text)
        room = shutil.get_terminal_size().columns - 1
        text = text[: sum(end <= room for end in ends)]
        if text != self._status:
            self._write("err", _CLEAR_LINE + text.encode("utf-8", errors="replace"))
            self._status = text

    def _write(self, stream: str, data: bytes) -> None:
        if self.broken:
            return
        left, self._writing_since = memoryview(data), self._clock()
        try:
            while left:  # without Python's buffer, a write that a signal interrupts is a part of it
                left = left[self._streams[stream].write(left) :]
            self._streams[stream].flush()
            self._writing_since = float("inf")
        except OSError as error:
            self.broken, self._writing_since = True, float("inf")
            if not isinstance(error, (BrokenPipeError, ConnectionResetError)) and stream == "out":
                with contextlib.suppress(OSError):
                    self._streams["err"].write(f"error: the output cannot be written: {error}\n".encode())
            # Python flushes stdout again at exit, and would report the error again: discard it.
            with open(os.devnull, "wb") as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), self._streams[stream].fileno())

    def give_up(self, *_: object) -> None:
        """As a signal's handler, end a write that nobody takes: a pager pauses, or a connection is frozen."""
        if self._clock() - self._writing_since >= _WAIT_SECONDS:
            raise BrokenPipeError("nobody reads it")


_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = (15.0, 45.0, 120.0, 300.0, 600.0)
"""When lines come in a log, since the start; then every time after half as long again."""


class Live:
    """How the run goes on one host: a line that changes on a terminal, lines at growing intervals in a log.

    Args:
        folder: where its ranks' pages are.
        ranks: those that are expected.
        terminal: whether the line changes in place.
    """

    def __init__(
        self, folder: Path, ranks: range, *, terminal: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._ranks, self._terminal, self._clock = folder, ranks, terminal, clock
        self._began = clock()
        self.due = self._began + (_TERMINAL_SECONDS if terminal else _LOG_SECONDS[0])
        """When the next line is due, by the clock."""

    def next_line(self, num_started: int, *, has_output: bool) -> str | None:
        """Return the line if it is due, and there is something to say."""
        now = self._clock()
        if now < self.due:
            return None
        elapsed = now - self._began
        next_in_log = self._began + next((due for due in _LOG_SECONDS if due > elapsed), elapsed * 1.5)
        self.due = now + _TERMINAL_SECONDS if self._terminal else next_in_log
        pages = {rank: read_status(self._folder, rank) for rank in self._ranks}
        known = {rank: page for rank, page in pages.items() if page is not None}
        if not known and has_output:
            return None
        return line_of(self._ranks, num_started, known, elapsed)


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
        return f"{things(num_ranks, 'rank')} up, importing{ready}{after}"
    if step < 0:
        return f"{things(num_ranks, 'rank')} ready, no step yet{after}"
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
