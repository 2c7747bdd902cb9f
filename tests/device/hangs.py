"""Tell ranks that hang from ranks that are slow: by what they do, not by how long they take.

Ranks hang when all of them have slept for seconds: nobody is left whom the others could wait for. On a machine that has
no time for them they do not sleep, they wait for a processor, and Linux tells the two apart. They also hang when they
have computed far more than they ever should, as a rank does that asks again and again for what never comes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_PERIOD: Final = 0.2
_ASLEEP: Final = 0.1
"""The share of the time that a sleeping rank computes at most: it may look now and then whether something has come."""
_SECONDS_FOR_STACKS: Final = 5.0
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_LINE: Final = re.compile(r'File ".*/smpkit/torch/(.*)", line \d+ in (\S+)')


def join(folder: str) -> None:
    """Let a `HangWatch` watch this rank."""
    file = Path(folder, f"{os.environ['RANK']}-{os.getpid()}.stacks").open("w")  # noqa: SIM115 - for as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


@dataclass(frozen=True)
class _Sample:
    """What all ranks do at a time.

    Attributes:
        used: seconds that they have computed.
        is_busy: whether a thread of theirs runs, or waits for a processor or a disk.
    """

    time: float
    used: float
    is_busy: bool


class HangWatch:
    """Watches ranks from the beginning to the end of a `with` block, and kills them if they hang.

    Args:
        ranks: how many there are; before each of them has called `join`, the others may wait for it.
        idle_seconds: for how long all of them sleep before they are said to hang.
        most_processor_seconds: what all of them may compute together.

    Attributes:
        folder: ranks give it to `join`.
        found: how they hang, and in which functions of smpkit's they are; empty if they do not.
    """

    def __init__(self, ranks: int, idle_seconds: float = 15.0, most_processor_seconds: float = 600.0) -> None:
        self.found = ""
        self._num_ranks = ranks
        self._idle_seconds, self._most = idle_seconds, most_processor_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = self._temporary.name

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._temporary.cleanup()

    def _watch(self) -> None:
        samples: deque[_Sample] = deque()
        while not self._is_over.wait(_PERIOD):
            ranks = _living(self.folder)
            if not ranks or len(_joined(self.folder)) < self._num_ranks:
                samples.clear()
                continue
            sample = _Sample(time.monotonic(), sum(map(_seconds_used, ranks)), any(map(_is_busy, ranks)))
            samples.append(sample)
            if sample.used > self._most:
                self._kill(ranks, f"they have computed for {sample.used:.0f} s")
            elif sample.time - samples[0].time >= self._idle_seconds:
                if _are_asleep(samples):
                    self._kill(ranks, "all sleep")
                samples.popleft()

    def _kill(self, ranks: dict[int, Path], how: str) -> None:
        self.found = "; ".join([how, *_places(ranks)])
        for process in ranks:
            _send(process, signal.SIGKILL)
        self._is_over.set()


def _are_asleep(samples: deque[_Sample]) -> bool:
    first, last = samples[0], samples[-1]
    num_busy = sum(each.is_busy for each in samples)
    return num_busy <= _ASLEEP * len(samples) and last.used - first.used <= _ASLEEP * (last.time - first.time)


def _joined(folder: str) -> dict[int, Path]:
    """Return each rank's process, with the file for its stacks, in the order of the ranks."""
    return {int(path.stem.partition("-")[2]): path for path in sorted(Path(folder).glob("*.stacks"))}


def _living(folder: str) -> dict[int, Path]:
    """Return those of them that live."""
    return {process: path for process, path in _joined(folder).items() if _stat(process)[:1] not in ([], ["Z"], ["X"])}


def _stat(process: int, thread: str = "") -> list[str]:
    """Return what the kernel says of a process or a thread of it, after its name; nothing of one that is gone."""
    try:
        return Path(f"/proc/{process}", thread, "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _seconds_used(process: int) -> float:
    stat = _stat(process)
    return (int(stat[11]) + int(stat[12])) / _TICKS_PER_SECOND if stat else 0.0


def _is_busy(process: int) -> bool:
    threads = Path(f"/proc/{process}").glob("task/*")
    return any(_stat(process, f"task/{each.name}")[:1] in (["R"], ["D"]) for each in threads)


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _places(ranks: dict[int, Path]) -> list[str]:
    """Return in which function of smpkit's each rank is: the innermost of each of its threads that has one."""
    for process in ranks:
        _send(process, signal.SIGUSR1)
    deadline = time.monotonic() + _SECONDS_FOR_STACKS
    while time.monotonic() < deadline and not all(file.stat().st_size for file in ranks.values()):
        time.sleep(_PERIOD)
    found = []
    for file in ranks.values():
        lines = [_LINE.search(thread) for thread in file.read_text().split("\n\n")]
        places = dict.fromkeys(f"{line[1]}:{line[2]}" for line in lines if line)
        found.append(f"rank {file.stem.partition('-')[0]} in {', '.join(places) or 'no function of smpkit'}")
    return found
