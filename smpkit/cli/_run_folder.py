"""What `smpkit run` writes into the folder of a run itself: before the ranks start, and when they have ended."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli._console import write_file
from smpkit.config.confidential import hide_in_line, masked
from smpkit.errors import SmpkitError
from smpkit.observe.runs import ENVIRONMENT, JOB, PLAN, SUMMARY, Run, make_run

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob

__all__ = ["begin_run", "end_run", "held", "is_running", "saved_job_text", "shown", "version_of"]

_PACKAGES: Final = ("smpkit", "torch", "numpy", "transformers", "accelerate")


def begin_run(job: LoadedJob, ranks: int, hosts: int) -> Run:
    """Make the folder of a run, with the job as it runs, its plan and its environment.

    Raises:
        RunsError, SmpkitError: it cannot be written.
    """
    now = datetime.now().astimezone()
    run = make_run(job.folder, job.config.name, now)
    place = os.path.relpath(job.folder.absolute(), run.path.absolute())
    content = {name: masked(name, value) for name, value in _content(job).items()}
    head = [f"As it ran: {_command(job)}", f"Paths are relative to {place}."]
    write_file(run.path / JOB, _as_yaml(head, content), "job of the run")
    environment = {**_environment(now, ranks, hosts), "settings": list(_settings(job))}
    write_file(run.path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n", "environment of the run")
    plan = _plan(job, ranks, hosts)
    if plan is not None:
        write_file(run.path / PLAN, json.dumps(plan, indent=2) + "\n", "plan of the run")
    return run


def end_run(run: Run, seconds: float, exit_reason: str) -> None:
    """Note how a run ended, in the summary that rank 0 wrote or, where it came to none, in one with little else."""
    from smpkit.observe.summary import RunSummary, read_summary, write_summary

    if (run.path / SUMMARY).is_file():
        summary = replace(read_summary(run.path), exit_reason=exit_reason)
    else:
        note = "the ranks left no figures: the script does not use smpkit, or ended early"
        summary = RunSummary(run.name, run.started.timestamp(), seconds, 0, exit_reason, notes=(note,))
    write_summary(run.path, summary)


@contextmanager
def held(run: Run) -> Iterator[None]:
    """Lock the folder of a run for as long as its command lives, however that ends."""
    folder = os.open(run.path, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(folder, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(folder)


def is_running(folder: Path) -> bool:
    """Tell whether the command of a run still holds its folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else has the lock
        return True
    finally:
        os.close(descriptor)
    return False


def shown(path: Path) -> str:
    """Return a path as short as it can be given on the command line here."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def saved_job_text(job: LoadedJob) -> str:
    """Return the job file that stands for a script and the options it was run with."""
    return _as_yaml([f"`smpkit run` of this file does the same as: {_command(job)}"], _content(job))


def version_of(package: str) -> str | None:
    """Return the version of a package that is installed here; None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _content(job: LoadedJob) -> dict[str, Any]:
    return job.config.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _as_yaml(head: Sequence[str], content: dict[str, Any]) -> str:
    from smpkit.config.documents import as_yaml

    return "".join(f"# {line}\n" for line in head) + as_yaml(content)


def _command(job: LoadedJob) -> str:
    options = [f"{flag} {shlex.quote(value)}" for flag, value in job.overrides]
    return hide_in_line(" ".join(["smpkit run", str(job.path), *options]))


def _plan(job: LoadedJob, ranks: int, hosts: int) -> dict[str, Any] | None:
    """Return what `smpkit plan --json` prints of this job; None if it is no job that can be planned."""
    from smpkit.cli._plan import as_plain
    from smpkit.cli._planned import Planned
    from smpkit.cli._world import World
    from smpkit.plan.decide import decide

    parameters = job.config.distribution.model_parallel
    if parameters is None:
        return None
    try:
        return as_plain(Planned(World(parameters, job.config.name), ranks, hosts, decide(parameters, ranks)))
    except SmpkitError:
        return None  # the ranks will refuse the same, with the reason


def _environment(now: datetime, ranks: int, hosts: int) -> dict[str, Any]:
    try:
        memory_bytes: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory_bytes = None
    return {
        "started": now.astimezone(timezone.utc).isoformat(timespec="seconds"),
        "command": hide_in_line(shlex.join(["smpkit", *sys.argv[1:]])),
        "host": socket.gethostname(),
        "hosts": hosts,
        "ranks": ranks,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
    }


def _settings(job: LoadedJob) -> Iterator[tuple[str, Any, str]]:
    """Yield every setting, with its value and where that came from."""
    for path, value, origin in job.settings():
        # Of the file its name only: who gets a report of this need not know the folders here.
        yield ".".join(map(str, path)), value, origin.replace(str(job.path), job.path.name)
