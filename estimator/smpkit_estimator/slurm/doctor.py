"""Check what a job on Slurm needs, one finding for each thing, with what to do about it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, Problem
from smpkit_estimator.finding import Finding, tried
from smpkit_estimator.slurm.commands import ask, controller_settings
from smpkit_estimator.slurm.folder import runs_folder
from smpkit_estimator.slurm.plan import container_runtime

__all__ = ["check_cluster"]

_SHORT_SECONDS = 60


def check_cluster(job: JobConfig | None, *, write: bool = False) -> list[Finding]:
    """Look at Slurm's commands, its controller, and what a job names.

    Args:
        write: also write and delete a small file where runs are kept.
    """
    reached = tried("slurm", _version)
    if reached.state != "ok":
        return [reached]
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("kill wait", _kill_wait),
        ("accounting", _accounting),
        ("runs", lambda: _runs(job, write=write)),
    ]
    if job is not None:
        checks += [("partition", lambda: _partition(job)), ("image", lambda: _image(job))]
    return [reached, *(tried(what, check) for what, check in checks)]


def _version() -> Finding:
    version = ask("sbatch", "--version", doing="cannot use Slurm").strip()
    name = controller_settings().get("ClusterName", "")
    return Finding("slurm", "ok", f"{version}: cluster `{name}` answers")


def _kill_wait() -> Finding:
    text = controller_settings().get("KillWait", "")
    seconds = int(text.split()[0]) if text[:1].isdigit() else 0
    if seconds >= _SHORT_SECONDS:
        return Finding("kill wait", "ok", f"KillWait: ranks have {seconds} s between SIGTERM and SIGKILL")
    hint = "large checkpoints need more: ask the administrators, or save often"
    return Finding("kill wait", "info", f"KillWait: ranks have {seconds} s between SIGTERM and SIGKILL", hint)


def _accounting() -> Finding:
    kind = controller_settings().get("AccountingStorageType", "")
    if kind.endswith("slurmdbd"):
        return Finding("accounting", "ok", "accounting: ended jobs are remembered by slurmdbd")
    return Finding("accounting", "info", "no slurmdbd: how jobs ended is kept in their folders alone")


def _runs(job: JobConfig | None, *, write: bool) -> Finding:
    chosen = job.backend.slurm.folder if job is not None else None
    root = Path(chosen).absolute() if chosen else runs_folder()
    if not write:
        there = "is there" if root.is_dir() else "will be made"
        return Finding("runs", "ok", f"runs are kept in {root}, which {there} (`--write` tries to write to it)")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-"):
            pass
    except OSError as error:
        raise CloudError(f"cannot write to {root}: {error.strerror}", hint="set `backend.slurm.folder`") from None
    return Finding("runs", "ok", f"wrote to and deleted from {root}")


def _partition(job: JobConfig) -> Finding:
    options = job.backend.slurm
    nodes = job.compute.num_hosts
    chosen = [f"--partition={options.partition}"] if options.partition else []
    text = ask("sinfo", "--noheader", "--format=%P|%D|%a|%l", *chosen, doing="cannot look at partitions")
    rows = [line.strip().split("|") for line in text.splitlines() if line.strip()]
    if not options.partition:
        rows = [row for row in rows if row[0].endswith("*")] or rows
    if not rows:
        return Finding("partition", "problem", f"there is no partition `{options.partition}`", "`sinfo` lists them")
    name, most = rows[0][0].rstrip("*"), max(int(row[1]) for row in rows)
    if all(row[2] != "up" for row in rows):
        return Finding("partition", "problem", f"partition `{name}` is {rows[0][2]}", "choose another one")
    if nodes > most:
        return Finding("partition", "problem", f"partition `{name}` has {most} nodes, the job asks for {nodes}")
    return Finding("partition", "ok", f"partition `{name}`: {most} nodes, jobs of at most {rows[0][3]}")


def _image(job: JobConfig) -> Finding:
    problems: list[Problem] = []
    runtime = container_runtime(job.backend.slurm, job.image, problems)
    if problems:
        return Finding("image", "problem", f"image {job.image} {problems[0].message}", problems[0].hint)
    if runtime != "none":
        return Finding("image", "ok", f"image {job.image} is started by {runtime}")
    python = Path(sys.executable)
    return Finding("image", "ok", f"no image: every node runs {python}, which it must see{_home(python)}")


def _home(python: Path) -> str:
    return "" if not str(python).startswith(("/tmp", "/var/tmp")) or os.name != "posix" else " (it lies in /tmp)"  # noqa: S108
