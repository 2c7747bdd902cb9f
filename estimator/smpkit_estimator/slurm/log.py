"""Read the logs of a run, which its nodes write into the run's folder: each line once, as far as it has come."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from smpkit_estimator.log_line import LogLine, rank_of

__all__ = ["RunLog"]

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z (.*)", re.DOTALL)
_CHUNK_BYTES = 1 << 20
_BATCH = "slurm.log"


@dataclass
class _Stream:
    path: Path
    host: str
    last: datetime
    """The time of its last line: what is printed beside the launcher has none."""
    offset: int = 0
    count: int = 0
    rest: bytes = b""


class RunLog:
    """A run's log; see `smpkit_estimator.backend.Log`."""

    def __init__(self, run: Path, since: datetime | None = None) -> None:
        self._folder = run / "logs"
        self._since = since
        self._streams: dict[str, _Stream] = {}
        self.incomplete: list[str] = []

    @property
    def hosts(self) -> set[str]:
        """The nodes that have logged anything."""
        return {stream.host for name, stream in self._streams.items() if name != _BATCH}

    @property
    def num_streams(self) -> int:
        """How many files there are so far."""
        return len(self._streams)

    def read(self) -> list[LogLine]:
        """Return what is new, sorted by time."""
        self._find()
        return sorted(line for stream in self._streams.values() for line in self._forward(stream))

    def tail(self, count: int, keep: Callable[[LogLine], bool]) -> list[LogLine]:
        """Return the last `count` lines of those that `keep` wants; `read` then goes on behind them.

        Of each file only as much of its end is read as it takes.
        """
        self._find()
        found = sorted(line for stream in self._streams.values() for line in self._backward(stream, count, keep))
        return found[-count:] if count else []

    def _find(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            if path.name in self._streams or not path.stat().st_size:
                continue
            host = "slurm" if path.name == _BATCH else path.stem.partition("-")[2]
            made = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
            self._streams[path.name] = _Stream(path, host, made)

    def _forward(self, stream: _Stream) -> list[LogLine]:
        lines: list[LogLine] = []
        with stream.path.open("rb") as file:
            file.seek(stream.offset)
            while chunk := file.read(_CHUNK_BYTES):
                stream.offset += len(chunk)
                whole, _, stream.rest = (stream.rest + chunk).rpartition(b"\n")
                lines += self._lines(stream, whole)
        return lines

    def _backward(self, stream: _Stream, count: int, keep: Callable[[LogLine], bool]) -> list[LogLine]:
        size = stream.path.stat().st_size
        length = _CHUNK_BYTES
        while True:
            start = max(0, size - length)
            with stream.path.open("rb") as file:
                file.seek(start)
                data = file.read(size - start)
            if start:
                data = data.partition(b"\n")[2]  # the first line may have begun before
            whole, _, stream.rest = data.rpartition(b"\n")
            stream.offset, stream.count = size, 0
            found = [line for line in self._lines(stream, whole) if keep(line)]
            if not start or len(found) >= count:
                return found[-count:] if count else []
            length *= 4

    def _lines(self, stream: _Stream, data: bytes) -> list[LogLine]:
        lines = []
        for text in data.decode("utf-8", "replace").split("\n") if data else ():
            found = _STAMPED.fullmatch(text)
            words = found[2] if found else text
            if found:
                stream.last = datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc)
            if self._since is None or stream.last >= self._since:
                line = LogLine(stream.last, stream.path.name, stream.count, words, stream.host, rank_of(words))
                lines.append(line)
            stream.count += 1
        return lines
