"""Parts as processes: each with its output in a file, none able to outlive its limit or to stop another."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Running", "start"]

_MARK: Final = "GPU_PART"
_GRACE_SECONDS: Final = 3.0


@dataclass(frozen=True)
class Running:
    """A part that runs."""

    process: subprocess.Popen[bytes]
    output: Path
    started: float
    limit: float
    mark: str

    @property
    def seconds(self) -> float:
        """For how long it has run."""
        return time.monotonic() - self.started

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_late(self) -> bool:
        return self.seconds > self.limit

    def end(self) -> int:
        """End what is left of it, and return its exit status; negative: the signal that ended it.

        Ranks have sessions of their own where torchrun started them, so they are found by what they inherited.
        """
        if self.process.poll() is None:
            _signal(self.process.pid, signal.SIGTERM)  # torchrun ends its ranks, pytest its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_SECONDS)
        _signal(self.process.pid, signal.SIGKILL)
        for pid in _marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.process.wait()


def start(command: Sequence[str], output: Path, variables: Mapping[str, str], folder: Path, limit: float) -> Running:
    """Start Python in a process group of its own.

    Args:
        command: its arguments.
        output: the file for what it prints.
        variables: beside those of this process.
        folder: where it runs.
        limit: seconds that it may take.
    """
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    environment = {**os.environ, **variables, _MARK: mark}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    return Running(process, output, time.monotonic(), limit, mark)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes that have inherited a mark, this one's own descendants."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
