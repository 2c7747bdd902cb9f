"""What one rank did, as a file of JSON lines: a header, then the events of a step in each line.

::

    events_0.jsonl   {"format": 2, "rank": 0, "host": "algo-1", "pp": 0, ...}
                     [["schedule", "0", "{...}"], ["action", 0, "F", 0, 2, 81503961, 81739452], ...]
                     [["action", 1, "F", 0, 0, 92503961, 92739452], ...]

An event is its type and the values of its fields in order. A line is written at once, and from rows instead of objects,
since that takes part of every recorded step.

Times are nanoseconds of the rank's own monotonic clock. Ranks note it as they leave a barrier, which puts the files of
several hosts on one axis; processes of one machine share the clock, so among them nothing is lost.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from smpkit.errors import SmpkitError

FORMAT: Final = 2
_NAME: Final = re.compile(r"events_(\d+)\.jsonl")
_PLACES: Final = (".", "events", "data/events", "output/data/events")
"""Where a run keeps its events, seen from the folder that a user may name: itself, or what `smpkit run` left."""


class EventsError(SmpkitError):
    """Files of events that are missing, damaged, or of different runs."""


@dataclass(frozen=True)
class Header:
    """Who wrote the file: the first line."""

    rank: int
    host: str
    run: str
    """Equal in all files of one run, and in no others."""
    clock: str
    """Names the clock; ranks with the same one need no alignment."""
    anchor_ns: int
    """The clock on leaving a barrier of all ranks."""
    pp: int
    tp: int
    rdp: int
    pp_size: int
    tp_size: int
    rdp_size: int
    placement_strategy: str

    @property
    def world_size(self) -> int:
        """How many files the run has."""
        return self.pp_size * self.tp_size * self.rdp_size


@dataclass(frozen=True)
class ActionSpan:
    """One action of the schedule (see `smpkit.plan.schedule.actions`); waiting for what it needs is part of it."""

    step: int
    kind: str
    segment: int
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class MessageSpan:
    """A value or gradient: on the sender while it is handed over, on the receiver while it is waited for."""

    step: int
    direction: str
    """`send` or `receive`."""
    peer: int
    """Global rank of the other end."""
    tag: int
    """Equal at both ends, and different for each message of a step between two ranks."""
    num_bytes: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class WorkSpan:
    """Anything else that takes time in a step, such as the reduction of gradients."""

    step: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class StepSpan:
    """One call of a step function; written last, so a step without it was interrupted."""

    number: int
    name: str
    schedule: str
    """Key of the planned schedule; empty if the microbatches ran straight through."""
    start_ns: int
    end_ns: int
    call: int = -1
    """Which call of this function, from 0, while `number` counts those of all; -1 in files of an older version."""


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule that steps refer to, as `smpkit.plan.schedule.actions.to_json` writes it."""

    key: str
    text: str


@dataclass(frozen=True)
class Counter:
    """A value that changes over time, such as the bytes that the process holds."""

    name: str
    value: int
    at_ns: int


UNKNOWN: Final = -1
"""Stands for a number of bytes that cannot be measured here."""


@dataclass(frozen=True)
class HeldBytes:
    """What a rank holds at one moment, in bytes."""

    weights: int
    """Parameters and buffers of the model."""
    gradients: int
    states: int
    """What the optimizer keeps, with its float32 weights."""
    activations: int
    """What the step has allocated and none of the others is; UNKNOWN where the allocator does not count."""
    parked: int
    """Activations on the device that leave it, or have come back."""
    offloaded: int
    """Activations on the host."""
    other: int
    """What was there when the step began; UNKNOWN where the allocator does not count."""
    bytes_out: int
    """Sent from the device to the host since the step began; the last copy may be under way."""
    bytes_back: int


@dataclass(frozen=True)
class MemorySample(HeldBytes):
    """What a rank held at one moment of a step."""

    step: int
    at_ns: int


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment."""

    name: str
    at_ns: int


Event = ActionSpan | MessageSpan | WorkSpan | StepSpan | PlannedSchedule | Counter | MemorySample | Mark

_TYPES: Final[Mapping[str, type[Event]]] = {
    "action": ActionSpan,
    "message": MessageSpan,
    "work": WorkSpan,
    "step": StepSpan,
    "schedule": PlannedSchedule,
    "counter": Counter,
    "memory": MemorySample,
    "mark": Mark,
}
Row: TypeAlias = "tuple[type[Event], Sequence[int | str]]"
"""An event that nobody has made an object of: its type, and the values of its fields in their order."""


_NAMES: Final = {kind: name for name, kind in _TYPES.items()}
_encoded: Final = json.JSONEncoder(separators=(",", ":")).encode


class EventWriter:
    """Writes the file of one rank, replacing one that is there; every call is one write, so a crash loses little."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.path = folder / f"events_{header.rank}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.write_text(_encoded({"format": FORMAT, **vars(header)}) + "\n", encoding="ascii")
            # Unbuffered: what the disk did not take must not be tried again when the file is closed.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise EventsError(f"events cannot be written to `{self.path}`: {error.strerror}") from None

    def write_rows(self, rows: Iterable[Row]) -> None:
        """Append events as one line; raise OSError if the disk does not take them."""
        line = _encoded([(_NAMES[kind], *values) for kind, values in rows]).encode() + b"\n"
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankLog:
    """The file of one rank, read."""

    header: Header
    events: tuple[Event, ...]
    truncated: bool
    """Whether the last line was incomplete and left out: the process was ended while it wrote."""


def find_events(folder: Path) -> list[Path]:
    """Return the files of a run in rank order, from the folder of events or from a run's output folder."""
    if not folder.is_dir():
        raise EventsError(f"there is no folder `{folder}`", hint="`smpkit runs` lists the runs here")
    for place in _PLACES:
        paths = {int(name[1]): path for path in (folder / place).glob("*") if (name := _NAME.fullmatch(path.name))}
        if paths:
            return [paths[rank] for rank in sorted(paths)]
    raise EventsError(
        f"there are no events in `{folder}`",
        hint="`smpkit run` records them from `smp.init()` on, and any other job with the variable SMPKIT_EVENTS_DIR",
    )


def read_events(path: Path) -> RankLog:
    """Read the file of one rank; a last line without its end is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EventsError(f"`{path}` cannot be read: {error.strerror}") from None
    *lines, rest = text.split("\n")
    if not lines:
        raise EventsError(f"`{path}` has no header", hint="the process ended before it wrote anything")
    header = _header(path, lines[0])
    events = [event for number, line in enumerate(lines[1:], 2) for event in _events(path, number, line)]
    return RankLog(header, tuple(events), truncated=bool(rest))


def _header(path: Path, line: str) -> Header:
    try:
        content = json.loads(line)
        number = content.pop("format")
        if number != FORMAT:
            raise EventsError(f"{path}:1: format {number}, and this smpkit reads format {FORMAT}")
        return Header(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _damaged(path, 1) from None


def _events(path: Path, number: int, line: str) -> list[Event]:
    try:
        return [_TYPES[name](*values) for name, *values in json.loads(line)]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _damaged(path, number) from None


def _damaged(path: Path, number: int) -> EventsError:
    return EventsError(f"{path}:{number}: not a line of events", hint="the file is damaged; record the run again")
