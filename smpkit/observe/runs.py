"""The folders of runs: `runs/<job name>-<YYYYmmdd-HHMMSS>/` beside the job file, and how a command finds one.

::

    runs/gpt-text-20261125-191502/
        job.yaml  plan.json  environment.json     what was to run, and on what
        events/   logs/                           what each rank did and printed
        summary.json  values.jsonl  warnings.jsonl
        checkpoints/                              where the job names no other place
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Final

from smpkit.config.words import closest, quoted
from smpkit.errors import SmpkitError, UsageError

RUN_DIR: Final = "SMPKIT_RUN_DIR"
"""The variable that tells the ranks their run's folder."""

JOB: Final = "job.yaml"
PLAN: Final = "plan.json"
ENVIRONMENT: Final = "environment.json"
EVENTS: Final = "events"
LOGS: Final = "logs"
SUMMARY: Final = "summary.json"
VALUES: Final = "values.jsonl"
WARNINGS: Final = "warnings.jsonl"
TRACE: Final = "trace.json"
CHECKPOINTS: Final = "checkpoints"

_RUNS: Final = "runs"
_NAME: Final = re.compile(r"(?P<name>.+)-(?P<time>\d{8}-\d{6})(?:-\d+)?")
_TIME: Final = "%Y%m%d-%H%M%S"
_DEPTH: Final = 2
"""How far below a folder its runs are looked for: `examples/gpt_text/runs` from a checkout's root."""


@dataclass(frozen=True)
class Run:
    """One run's folder."""

    path: Path
    name: str
    """Of the job."""
    started: datetime
    """Local time, to the second."""

    @property
    def label(self) -> str:
        """What `open_run` takes."""
        return self.path.name


def make_run(folder: Path, name: str, now: datetime) -> Run:
    """Make the folder of a new run of job `name` below `folder`, and see to it that git ignores it."""
    runs = folder / _RUNS
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if not (runs / ".gitignore").exists():
            (runs / ".gitignore").write_text("*\n", encoding="ascii")
        for again in count(1):
            path = runs / f"{name}-{now.strftime(_TIME)}{f'-{again}' if again > 1 else ''}"
            with suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as error:
        raise SmpkitError(f"the folder of a run cannot be made in `{runs}`: {error.strerror}") from None
    return Run(path, name, now.replace(microsecond=0))


@contextmanager
def held(folder: Path, alone: str = "") -> Iterator[None]:
    """Lock a folder for as long as this process lives, however that ends.

    Args:
        alone: the key of the job file that names it; then one that another run holds so is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        os.close(descriptor)
        hint = f"give each run a folder of its own: `--set {alone}=FOLDER`"
        raise UsageError(f"another run saves its {alone} to `{folder}`", hint=hint) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool | None:
    """Return whether a command that still lives holds a folder; None where the file system cannot tell."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def run_at(path: Path) -> Run | None:
    """Return the run whose folder this is, by its name; None if it is none."""
    match = _NAME.fullmatch(path.name)
    if match is None or path.parent.name != _RUNS:
        return None
    with suppress(ValueError):  # no time of any day
        return Run(path, match["name"], datetime.strptime(match["time"], _TIME).astimezone())
    return None


def find_runs(folder: Path) -> tuple[Run, ...]:
    """Return the runs in `runs` of `folder` and of the folders up to two below it, the oldest first.

    `folder` may also be a run or `runs` itself.
    """
    folder = folder.absolute()
    own = run_at(folder)
    if own is not None:
        return (own,)
    paths = folder.iterdir() if folder.name == _RUNS else _below(folder)
    runs = [run for path in paths if _is_plain(path) and (run := run_at(path)) is not None]
    # Those of one second are numbered, `-2` before `-10`.
    return tuple(sorted(runs, key=lambda run: (run.started, len(run.label), run.path)))


def _below(folder: Path) -> Iterator[Path]:
    """Yield what is in `runs` of a folder and of those below it, but not in `runs` of a run."""
    for depth in range(_DEPTH + 1):
        for path in folder.glob("*/" * depth + f"{_RUNS}/*"):
            if all(_is_plain(between) and between.name != _RUNS for between in path.parents[1 : depth + 1]):
                yield path


def _is_plain(path: Path) -> bool:
    """Tell whether a path is a folder, not hidden and no link, which may lead in circles."""
    return path.name[0] != "." and path.is_dir() and not path.is_symlink()


def last_run(folder: Path) -> Run:
    """Return the run that started last; raise UsageError if there is none."""
    runs = find_runs(folder)
    if not runs:
        hint = "`smpkit run JOB_FILE` makes one, in `runs` beside the job file"
        raise UsageError(f"there are no runs in `{folder}`", hint=hint)
    return runs[-1]


def open_run(text: str | None) -> Run:
    """Return the run that a user names: by its folder's path or name, by its job (the last one), or None for the last.

    A folder that does not look like a run is taken as one, too: events may lie anywhere.
    """
    where = Path.cwd()
    if text is None:
        return last_run(where)
    path = (where / text).absolute()
    if path.is_dir():
        # `runs/`, or a folder that has it, stands for the last run there.
        runs = find_runs(path) if run_at(path) or path.name == _RUNS or (path / _RUNS).is_dir() else ()
        changed = datetime.fromtimestamp(int(path.stat().st_mtime)).astimezone()
        return runs[-1] if runs else Run(path, path.name, changed)
    runs = find_runs(where)
    run = next((run for run in reversed(runs) if text in (run.label, run.name)), None)
    if run is None:
        near = closest(text, [*(run.label for run in runs), *(run.name for run in runs)])
        hint = f"did you mean `{near}`?" if near else "`smpkit runs` lists them"
        raise UsageError(f"there is no run {quoted(text)} in `{where}`", hint=hint)
    return run
