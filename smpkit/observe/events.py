"""What one rank did, as a file of lines: a header, then one event per line, each a JSON object.

::

    events_0.jsonl   {"type": "header", "format": 1, "rank": 0, "host": "algo-1", "pp": 0, ...}
                     {"type": "schedule", "key": "0", "text": "{...}"}
                     {"type": "action", "step": 0, "kind": "F", "segment": 0, "microbatch": 2, "start_ns": ...}
                     {"type": "step", "number": 0, "name": "train_step", "schedule": "0", ...}

Times are nanoseconds of the rank's own monotonic clock. Ranks note it as they leave a barrier, which puts the files of
several hosts on one axis; processes of one machine share the clock, so among them nothing is lost.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import starmap
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from smpkit.errors import SmpkitError

__all__ = [
    "UNKNOWN",
    "ActionSpan",
    "Counter",
    "Event",
    "EventWriter",
    "EventsError",
    "Header",
    "HeldBytes",
    "Mark",
    "MemorySample",
    "MessageSpan",
    "PlannedSchedule",
    "RankLog",
    "Row",
    "StepSpan",
    "WorkSpan",
    "file_name",
    "find_events",
    "read_events",
]

FORMAT: Final = 1
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
    anchor_unix_ns: int
    """The time of day at that moment."""
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


def file_name(rank: int) -> str:
    """Return the name of the file of one rank."""
    return f"events_{rank}.jsonl"


# --- writing ----------------------------------------------------------------------------------------------------------


def _form(name: str, kind: type[Event]) -> tuple[str, tuple[int, ...]]:
    """Return the line of a type of event, with a place for each value, and which values are texts."""
    places = "".join(f',"{field.name}":%s' for field in fields(kind))
    texts = tuple(number for number, field in enumerate(fields(kind)) if field.type == "str")
    return f'{{"type":"{name}"{places}}}\n', texts


_FORMS: Final = {kind: _form(name, kind) for name, kind in _TYPES.items()}


def _line(kind: type[Event], values: Sequence[int | str]) -> str:
    """Return the line of an event, as `json.dumps` would write it."""
    form, texts = _FORMS[kind]
    if texts:
        values = [*values]
        for at in texts:
            values[at] = json.encoder.encode_basestring_ascii(str(values[at]))
    return form % tuple(values)


class EventWriter:
    """Writes the file of one rank, replacing one that is there; every call is one write, so a crash loses little.

    Raises:
        EventsError: the folder or file cannot be made.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.path = path = folder / file_name(header.rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what the disk did not take must not be tried again when the file is closed.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            self._put(json.dumps({"type": "header", "format": FORMAT, **vars(header)}, separators=(",", ":")) + "\n")
        except OSError as error:
            self._file.close()
            raise _unwritable(path, error) from None

    def write(self, events: Iterable[Event]) -> None:
        """Append events; raise OSError if the disk does not take them."""
        self.write_rows((type(event), [*vars(event).values()]) for event in events)

    def write_rows(self, rows: Iterable[Row]) -> None:
        """Append events that are rows; raise OSError if the disk does not take them."""
        self._put("".join(starmap(_line, rows)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _put(self, text: str) -> None:
        data = text.encode()
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unwritable(path: Path, error: OSError) -> EventsError:
    return EventsError(f"events cannot be written to `{path}`: {error.strerror}")


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankLog:
    """The file of one rank, read."""

    header: Header
    events: tuple[Event, ...]
    truncated: bool
    """Whether the last line was incomplete and left out: the process was ended while it wrote."""


def find_events(folder: Path) -> list[Path]:
    """Return the files of a run in rank order, from the folder of events or from a run's output folder.

    Raises:
        EventsError: there is no such folder, or there are none in it.
    """
    if not folder.is_dir():
        raise EventsError(f"there is no folder `{folder}`", hint="`smpkit runs` lists the runs here")
    for place in _PLACES:
        inside = folder / place
        found = {int(name[1]): path for path in _listing(inside) if (name := _NAME.fullmatch(path.name))}
        if found:
            return [found[rank] for rank in sorted(found)]
    raise EventsError(
        f"there are no events in `{folder}`",
        hint="`smpkit run` records them, and any other job with the variable SMPKIT_EVENTS_DIR",
    )


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise EventsError(f"`{folder}` cannot be read: {error.strerror}") from None


def read_events(path: Path) -> RankLog:
    """Read the file of one rank; a last line without its end is left out.

    Raises:
        EventsError: the file cannot be read or is not what `EventWriter` wrote; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EventsError(f"`{path}` cannot be read: {error.strerror}") from None
    *lines, rest = text.split("\n")
    if not lines:
        raise EventsError(f"`{path}` has no header", hint="the process ended before it wrote anything")
    header = _header(path, lines[0])
    events = [_event(path, number, line) for number, line in enumerate(lines[1:], 2)]
    return RankLog(header, tuple(events), truncated=bool(rest))


def _header(path: Path, line: str) -> Header:
    content = _object(path, 1, line)
    if content.pop("type", None) != "header":
        raise EventsError(f"{path}:1: the first line is not a header")
    if (number := content.pop("format", None)) != FORMAT:
        raise EventsError(f"{path}:1: format {number}, and this smpkit reads format {FORMAT}")
    return _made(path, 1, Header, content)


def _event(path: Path, number: int, line: str) -> Event:
    content = _object(path, number, line)
    kind = content.pop("type", None)
    if not isinstance(kind, str) or kind not in _TYPES:
        raise EventsError(f"{path}:{number}: `{kind}` is no type of event")
    return _made(path, number, _TYPES[kind], content)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise EventsError(f"{path}:{number}: not a line of events", hint="the file is damaged; record the run again")
    return content


_Made = TypeVar("_Made")
_PYTHON_TYPES: Final[Mapping[str, type]] = {"int": int, "str": str}


def _made(path: Path, number: int, kind: type[_Made], content: Mapping[str, Any]) -> _Made:
    """Make a dataclass whose fields are all integers or texts, which is checked."""
    expected = {field.name: _PYTHON_TYPES[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    wrong = [name for name, python_type in expected.items() if type(content.get(name)) is not python_type]
    wrong += [name for name in content if name not in expected]
    start, end = content.get("start_ns", 0), content.get("end_ns", 0)
    if not wrong and end < start:
        wrong = ["end_ns"]
    if wrong:
        names = ", ".join(f"`{name}`" for name in wrong)
        raise EventsError(f"{path}:{number}: {kind.__name__} with a missing, unknown or wrong {names}")
    return kind(**content)
