"""The folders of runs: what is written before a job is sent, found again by its name, and the logs.

::

    ~/smpkit-runs/NAME/     SMPKIT_RUNS or `backend.slurm.folder` moves it; only its owner may look inside
        job.json            the job file, for `smpkit resume`, and when it was sent
        script.sh           the batch script
        slurm.json          the id that Slurm gave it
        variables.json, token   what nobody else may read
        code/               the unpacked sources
        input/ model/ output/ checkpoints/    as below /opt/ml; links where the job file names other places
        nodes/NODE/         what stands for /opt/ml on a node: links to these, and its own output/failure
        logs/               one file for each attempt and node, and slurm.log, what the batch script printed
        stopped             `smpkit stop` was here
        ended               how it ended: exit code, restarts, when it began and ended
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.config.words import printable
from smpkit.errors import CloudError, UsageError
from smpkit_estimator.backend import LogLine, check_name, merged
from smpkit_estimator.local import make_tree
from smpkit_estimator.scheduled import job_to_keep, result_places
from smpkit_estimator.sources import Sources


@dataclass(frozen=True)
class Run:
    """What is written before a job is sent."""

    folder: Path
    script: str
    job: JobConfig
    files: Mapping[str, Mapping[str, Any]]
    """Of `input/config`."""
    variables: Mapping[str, str] = field(repr=False)
    """With the job's secrets."""
    inputs: Mapping[str, Path]
    cluster: str
    sources: Sources | None
    """What is shipped; None for a run that takes the sources of another one."""
    code: Path | None = None
    """The sources of that other run."""


def named_places(job: JobConfig) -> dict[str, Path]:
    """Return the folders of a run that lie where the job file says."""
    places = result_places(job.output, job.checkpoints.uri if job.checkpoints is not None else None)
    return {part: Path(place) for part, place in places.items()}


def runs_folder() -> Path:
    chosen = os.environ.get("SMPKIT_RUNS")
    if chosen:
        return Path(chosen).absolute()
    try:
        return Path.home() / "smpkit-runs"
    except RuntimeError:  # neither HOME nor a line in /etc/passwd, as of a container's arbitrary user
        hint = "set SMPKIT_RUNS to a folder that all nodes see"
        raise UsageError("the folder of runs is unknown: this user has no home folder", hint=hint) from None


def find_run(name: str) -> Path:
    check_name(name)
    run = runs_folder() / name
    if not (run / "job.json").is_file():
        hint = "`smpkit jobs` lists them; SMPKIT_RUNS names another folder of runs"
        raise UsageError(f"there is no job `{name}` in {runs_folder()}", hint=hint)
    return run.resolve()


def all_runs() -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from (path.resolve() for path in runs_folder().iterdir() if (path / "job.json").is_file())


def make_run(run: Run, now: datetime) -> None:
    """Make the folder of a run, or nothing at all: not half of one on a full disk, or when Ctrl-C comes meanwhile."""
    folder, root = run.folder, runs_folder()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (root / folder.name).exists() or folder.exists():
            raise UsageError(f"there is a job `{folder.name}` already", hint="`--name` gives another name")
        folder.mkdir(mode=0o700)
        try:
            _fill_run(run, now)
        except BaseException:
            unmake_run(folder)
            raise
    except OSError as error:
        hint = "set `backend.slurm.folder` or SMPKIT_RUNS to a folder that all nodes see and you may write to"
        reason = (error.strerror or str(error)).lower()
        raise CloudError(f"cannot make {printable(str(folder))}: {reason}", hint=hint) from None


def _fill_run(run: Run, now: datetime) -> None:
    folder, root = run.folder, runs_folder()
    if folder.parent.resolve() != root.resolve():
        (root / folder.name).symlink_to(folder, target_is_directory=True)
    for part in ("logs", "nodes", "output", "input/data"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    named = named_places(run.job)
    results = {part: named.get(part, folder / part) for part in ("model", "output/data", "checkpoints")}
    make_tree(folder, results, run.inputs, run.files)
    for file, text in (("token", secrets.token_hex(32)), ("variables.json", json.dumps(dict(run.variables)))):
        (folder / file).touch(mode=0o600, exist_ok=False)
        (folder / file).write_text(text, encoding="utf-8")
    if run.sources is not None:
        _copy(run.sources, folder / "code")
    elif run.code is not None:
        shutil.copytree(run.code, folder / "code")
    (folder / "script.sh").write_text(run.script, encoding="utf-8")
    write_json(folder / "job.json", {"created": now.isoformat(), "cluster": run.cluster, "job": job_to_keep(run.job)})


def unmake_run(run: Path) -> None:
    """Remove the folder of a run that was not started."""
    link = runs_folder() / run.name
    if link.is_symlink():
        link.unlink()
    shutil.rmtree(run, ignore_errors=True)


def _copy(sources: Sources, code: Path) -> None:
    """Copy what elsewhere goes into an archive: no secrets, and files in place of links."""
    for entry in sources.entries:
        target = code / entry.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry.path, target)
        target.chmod(0o755 if entry.executable else 0o644)


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file holds; empty if it is missing or half written."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
    return {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file at once, so that nobody reads half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=2), encoding="utf-8")
    part.replace(path)


def kept_job(run: Path) -> dict[str, Any]:
    """Return what `job.json` holds: the job file, when it was sent, and to which cluster."""
    kept = read_json(run / "job.json")
    with contextlib.suppress(KeyError, TypeError, ValueError):
        datetime.fromisoformat(kept["created"])
        if isinstance(kept["job"], dict):
            return kept
    raise CloudError(f"{run / 'job.json'} is damaged", hint=f"`rm -r {shlex.quote(str(run))}` forgets the job")


_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z (.*)", re.DOTALL)


def run_log(run: Path, since: datetime | None, tail: int | None) -> Iterator[list[LogLine]]:
    """Yield without end what nodes have written into a run's folder since the last time, sorted by time."""
    streams: dict[str, _Stream] = {}
    while True:
        for path in sorted((run / "logs").glob("*.log")):
            if path.name not in streams and path.stat().st_size:
                began = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
                streams[path.name] = _Stream(path, _node_of(path), began)
        lines: list[LogLine] = []
        for stream in streams.values():
            lines += deque((line for line in stream.read() if since is None or line.time >= since), maxlen=tail)
        tail = None
        yield merged(lines)


def _node_of(path: Path) -> str:
    """Return the node that wrote a file; the file's name has the attempt and the node's number: `0-1.log`."""
    attempt, _, number = path.stem.partition("-")
    try:
        return path.with_name(f"{attempt}.hosts").read_text().split()[int(number)]
    except (OSError, ValueError, IndexError):  # such as `slurm.log`, or where the disk was full
        return path.stem


@dataclass
class _Stream:
    path: Path
    host: str
    last: datetime
    """The time of its last line: what is printed beside the launcher has none."""
    offset: int = 0

    def read(self) -> Iterator[LogLine]:
        """Yield the lines that are new."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, end, _ = file.read().rpartition(b"\n")  # half a line is read again
        self.offset += len(whole + end)
        for text in whole.decode("utf-8", "replace").split("\n") if end else ():
            stamped = _STAMPED.fullmatch(text)
            if stamped:
                self.last = datetime.fromisoformat(stamped[1]).replace(tzinfo=timezone.utc)
            yield LogLine(self.last, self.host, stamped[2] if stamped else text)
