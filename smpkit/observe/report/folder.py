"""Read what a run left in its folder, and say of what is missing which option records it.

Everything but the events is optional, and everything may break off: a run may have been killed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from smpkit.config.confidential import hide_in_line
from smpkit.errors import SmpkitError
from smpkit.observe import runs
from smpkit.observe.events import find_events, read_events
from smpkit.observe.merge import Run, merge
from smpkit.observe.report.settings import Setting, settings_of
from smpkit.observe.summary import RunSummary, read_summary
from smpkit.observe.values import LOSS, read_values

__all__ = ["Curve", "LogTail", "Material", "Warned", "read_material"]

_TAIL_BYTES: Final = 64 << 10
_TAIL_LINES: Final = 40
_MOST_LOGS: Final = 4
_LOG_NAME: Final = re.compile(r"rank-(\d+)\.log")
_FAILING: Final = re.compile(r"^Traceback \(most recent call last\)|^\w*(?:Error|Exception)\b", re.MULTILINE)


@dataclass(frozen=True)
class Curve:
    """One logged value over the steps."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float | None, ...]
    """None where it was not a finite number."""

    broken: str = ""
    """How often it was not one, and since when."""


@dataclass(frozen=True)
class LogTail:
    """The last lines that a rank printed."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Warned:
    """A warning, and from where."""

    rank: int | None
    text: str


@dataclass(frozen=True)
class Material:
    """All that is known of a run."""

    name: str
    folder: str
    """Its name only: a report is sent to others."""
    summary: RunSummary | None = None
    events: Run | None = None
    curves: tuple[Curve, ...] = ()
    settings: tuple[Setting, ...] = ()
    plan: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    warnings: tuple[Warned, ...] = ()
    logs: tuple[LogTail, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    """By section, what would have recorded it."""


def read_material(run: runs.Run) -> Material:
    """Read the folder of a run, or any folder with events.

    Raises:
        SmpkitError: there is nothing of a run in it, or what is there is damaged.
    """
    missing: dict[str, str] = {}
    events = _events(run.path, missing)
    summary = _summary(run.path, missing)
    curves = tuple(_curves(run.path))
    settings = settings_of(run.path)
    if events is None and summary is None and not curves and not settings:
        # Whoever names a folder of nothing at all gets the sentence about events.
        find_events(run.path)
    if not curves:
        missing["values"] = "No values: a step's `loss.reduce_mean()` records the loss, `smp.log` anything else."
    if not settings:
        missing["settings"] = "The job is not in this folder: `smpkit run JOB_FILE` keeps it there."
    environment = _environment(run.path)
    if not environment:
        missing["environment"] = "The environment was not recorded: `smpkit run JOB_FILE` does it."
    return Material(
        name=run.name,
        folder=run.label,
        summary=summary,
        events=events,
        curves=curves,
        settings=settings,
        plan=_object(run.path / runs.PLAN),
        environment=environment,
        warnings=tuple(_warnings(run.path)),
        logs=tuple(_logs(run.path, summary)),
        missing=missing,
    )


# --- its parts --------------------------------------------------------------------------------------------------------


def _events(folder: Path, missing: dict[str, str]) -> Run | None:
    try:
        paths = find_events(folder)
    except SmpkitError:
        missing["events"] = (
            "No events were recorded: `smpkit run` records them unless told otherwise, and any other job where the "
            "variable `SMPKIT_EVENTS_DIR` names a folder on every host."
        )
        return None
    try:
        return merge([read_events(path) for path in paths])
    except SmpkitError as error:
        missing["events"] = f"The events cannot be used: {error.message}."
        return None


def _summary(folder: Path, missing: dict[str, str]) -> RunSummary | None:
    if not (folder / runs.SUMMARY).is_file():
        missing["summary"] = "The run wrote no summary: it does at its end where `smpkit run` started it."
        return None
    try:
        return read_summary(folder)
    except SmpkitError as error:
        missing["summary"] = error.message
        return None


def _curves(folder: Path) -> Iterator[Curve]:
    found: dict[str, dict[float, float | None]] = {}
    for logged in read_values(folder):
        for name, value in logged.values.items():
            # A run that was resumed logs some steps again: the last time counts.
            found.setdefault(name, {})[float(logged.step)] = value if math.isfinite(value) else None
    for name in sorted(found, key=lambda name: name != LOSS):
        points = found[name]
        ordered = sorted(points)
        yield Curve(name, tuple(ordered), tuple(points[step] for step in ordered), _broken(points))


def _broken(points: Mapping[float, float | None]) -> str:
    at = sorted(step for step, value in points.items() if value is None)
    if not at:
        return ""
    often = "once, at" if len(at) == 1 else f"{len(at):,} times, first at"
    return f"NaN or infinite {often} step {at[0]:,.0f}"


def _environment(folder: Path) -> dict[str, str]:
    return dict(_flat(_object(folder / runs.ENVIRONMENT) or {}, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, "–" if value is None else str(value)


def _warnings(folder: Path) -> Iterator[Warned]:
    for line in _objects(folder / runs.WARNINGS):
        rank = line.get("rank")
        yield Warned(rank if isinstance(rank, int) else None, hide_in_line(str(line.get("text", ""))))


def _logs(folder: Path, summary: RunSummary | None) -> Iterator[LogTail]:
    """Yield the last lines of the ranks that failed; of a run that went well, of none."""
    if summary is not None and summary.exit_reason in ("finished", "running", "stopped"):
        return
    paths = [path for path in _files(folder / runs.LOGS) if path.suffix == ".log"]
    tails = {path.name: _tail(path) for path in paths}
    reason = "" if summary is None else summary.exit_reason
    named = {f"rank-{rank}.log" for rank in re.findall(r"\brank (\d+)", reason)}
    failing = [name for name in sorted(tails, key=_rank) if name in named]
    failing += [name for name in sorted(tails, key=_rank) if name not in named and _FAILING.search(tails[name])]
    if not failing and reason.startswith("failed"):
        failing = [name for name in tails if name == "launcher.log"]
    for name in failing[:_MOST_LOGS]:
        lines = tails[name].rstrip().splitlines()[-_TAIL_LINES:]
        yield LogTail(name.removesuffix(".log"), tuple(map(hide_in_line, lines)))


def _rank(name: str) -> int:
    match = _LOG_NAME.fullmatch(name)
    return int(match[1]) if match else 1 << 30


# --- files ------------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except OSError:
        return []


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(path: Path) -> dict[str, Any] | None:
    return next(_objects_in([_text(path)]), None)


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    return _objects_in(_text(path).splitlines())


def _objects_in(texts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among some texts; the last line of a file may break off."""
    for text in texts:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            yield content
