"""What `smpkit run` writes into the folder of a run itself: before the ranks start, and when they have ended."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli._files import write_file

if TYPE_CHECKING:
    from smpkit.config.load import LoadedJob
    from smpkit.observe.runs import Run
    from smpkit.observe.summary import RunSummary

__all__ = ["begin_run", "end_run", "saved_job_text", "shown", "version_of"]

_PACKAGES: Final = ("smpkit", "torch", "numpy", "transformers", "accelerate")


def begin_run(job: LoadedJob, ranks: int, hosts: int, overrides: Sequence[str]) -> Run:
    """Make the folder of a run, with the job as it runs, its plan and its environment.

    Raises:
        RunsError, SmpkitError: it cannot be written.
    """
    from smpkit.observe.runs import ENVIRONMENT, JOB, PLAN, make_run

    now = datetime.now().astimezone()
    run = make_run(job.folder, job.config.name, now)
    write_file(run.path / JOB, _job_text(job, run.path, overrides), "job of the run")
    environment = {**_environment(now, ranks, hosts), "settings": list(_settings(job))}
    write_file(run.path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n", "environment of the run")
    plan = _plan(job, ranks, hosts)
    if plan is not None:
        write_file(run.path / PLAN, json.dumps(plan, indent=2) + "\n", "plan of the run")
    return run


def end_run(run: Run, seconds: float, exit_reason: str) -> RunSummary:
    """Note how a run ended, in the summary that rank 0 wrote or, where it came to none, in one with little else."""
    from smpkit.observe.runs import SUMMARY
    from smpkit.observe.summary import RunSummary, read_summary, write_summary

    if (run.path / SUMMARY).is_file():
        summary = replace(read_summary(run.path), exit_reason=exit_reason)
    else:
        note = "the ranks left no figures: the script does not use smpkit, or ended early"
        summary = RunSummary(run.name, run.started.timestamp(), seconds, 0, exit_reason, notes=(note,))
    write_summary(run.path, summary)
    return summary


def shown(path: Path) -> str:
    """Return a path as short as it can be given on the command line here."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _job_text(job: LoadedJob, folder: Path, overrides: Sequence[str]) -> str:
    from smpkit.config.confidential import masked

    content = {name: masked(name, value) for name, value in _content(job).items()}
    place = os.path.relpath(job.folder.absolute(), folder.absolute())
    return _as_yaml([f"As it ran: {_command(job, overrides)}", f"Paths are relative to {place}."], content)


def saved_job_text(job: LoadedJob, overrides: Sequence[str]) -> str:
    """Return the job file that stands for a script and the options it was run with."""
    return _as_yaml([f"`smpkit run` of this file does the same as: {_command(job, overrides)}"], _content(job))


def _content(job: LoadedJob) -> dict[str, Any]:
    return job.config.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _as_yaml(head: Sequence[str], content: Mapping[str, Any]) -> str:
    from smpkit.config.documents import as_yaml

    return "".join(f"# {line}\n" for line in head) + as_yaml(dict(content))


def _command(job: LoadedJob, overrides: Sequence[str]) -> str:
    from smpkit.config.confidential import hide_in_line
    from smpkit.config.load import option

    options = [f"{flag} {shlex.quote(value)}" for flag, value in map(option, overrides)]
    return hide_in_line(" ".join(["smpkit run", str(job.path), *options]))


def _plan(job: LoadedJob, ranks: int, hosts: int) -> dict[str, Any] | None:
    """Return what `smpkit plan --json` prints of this job; None of one that no plan describes."""
    from smpkit.cli._plan import as_plain
    from smpkit.cli._planned import Planned
    from smpkit.cli._world import World
    from smpkit.errors import SmpkitError
    from smpkit.plan.decide import decide

    parameters = job.config.distribution.model_parallel
    if parameters is None:
        return None
    try:
        return as_plain(Planned(World(parameters, job.config.name), ranks, hosts, decide(parameters, ranks)))
    except SmpkitError:
        return None  # the ranks will refuse the same, with the reason


def _environment(now: datetime, ranks: int, hosts: int) -> dict[str, Any]:
    from smpkit.config.confidential import hide_in_line

    return {
        "started": now.astimezone(timezone.utc).isoformat(timespec="seconds"),
        "command": hide_in_line(shlex.join(["smpkit", *sys.argv[1:]])),
        "host": socket.gethostname(),
        "hosts": hosts,
        "ranks": ranks,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
    }


def version_of(package: str) -> str | None:
    """Return the version of a package that is installed here; None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _settings(job: LoadedJob) -> Iterator[tuple[str, Any, str]]:
    """Yield every setting, with its value and where that came from."""
    from smpkit.config.confidential import masked

    values = job.config.model_dump(mode="json")
    for path, origin in job.origins.items():
        value: Any = values
        for part in path:
            value = value[part]
        # Of the file its name only: who gets a report of this need not know the folders here.
        yield ".".join(map(str, path)), masked(str(path[-1]), value), origin.replace(str(job.path), job.path.name)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
