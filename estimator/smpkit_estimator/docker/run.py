"""Run a job in containers on this machine: start one for each host, show their output, stop them, collect results."""

from __future__ import annotations

import contextlib
import filecmp
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from smpkit.errors import LaunchError
from smpkit.observe.runs import CHECKPOINTS, EVENTS, RUN_DIR
from smpkit_estimator.docker.engine import check, docker, quietly
from smpkit_estimator.docker.hosts import STOP_SECONDS, Host, Run, lay_out, start_command
from smpkit_estimator.local import LocalPlan

__all__ = ["DockerRun", "Show", "merge", "run_in_docker"]

Show = Callable[[str, str, str], object]
"""Called with a host, `out` or `err`, and a line of its output."""

_POLL_SECONDS = 0.1
_FOLLOW_SECONDS = 60.0
"""For the other hosts to end after one failed; they learn of it within seconds."""

_DOCKER_FAILED = 125

_RECORDS = "run"
"""The folder, among the script's other results, into which the ranks write what belongs into the folder of the run."""
_IN_CONTAINER = f"/opt/ml/output/data/{_RECORDS}"


@dataclass(frozen=True)
class DockerRun:
    """How a run in containers ended, and what it left."""

    exit_code: int
    seconds: float
    interrupted: bool
    """Whether Ctrl-C or SIGTERM ended it."""
    rehearsed: bool
    """Whether it was interrupted on request and went on."""
    failure: str | None
    model: Path | None
    output_data: Path | None
    checkpoints: Path | None
    clashes: tuple[str, ...]
    """Files that several hosts wrote differently under one name."""


def run_in_docker(
    plan: LocalPlan,
    image: str,
    folder: Path,
    arguments: Sequence[str] = (),
    *,
    show: Show,
    gpus: bool = False,
    interrupt_after: float | None = None,
    events: bool = False,
) -> DockerRun:
    """Run the job and wait for it. Must be called in the main thread, because it handles SIGINT and SIGTERM.

    The first of these asks the ranks to end as SageMaker does (SIGTERM, 120 s later SIGKILL), a second one kills them.

    Args:
        folder: that of the run, which exists; for results where the job file names no place.
        show: is given the output, line by line, from several threads but one at a time.
        interrupt_after: seconds after the first line of the script until the containers are stopped as if spot
            instances were taken away; new ones then go on with nothing but the checkpoints.

    Raises:
        LaunchError: there is no Docker, or the containers could not be started.
    """
    check()
    run = _prepared(plan, image, folder, gpus)
    variables = {RUN_DIR: _IN_CONTAINER, **({"SMPKIT_EVENTS_DIR": f"{_IN_CONTAINER}/{EVENTS}"} if events else {})}
    began = time.monotonic()
    rehearsed = False
    try:
        docker("network", "create", run.network)
        with _signals() as received:
            attempt = _Attempt(run, arguments, variables, show, received)
            codes = attempt.play(interrupt_after)
            if attempt.rehearsed and not received:
                rehearsed = True
                _forget(run)
                codes = _Attempt(run, arguments, variables, show, received).play(None)
    finally:
        quietly([("rm", "--force", *(host.container for host in run.hosts)), ("network", "rm", run.network)])
        _own(run)
    try:
        return _collected(run, folder, codes, time.monotonic() - began, bool(received), rehearsed)
    finally:
        shutil.rmtree(run.tree, ignore_errors=True)


class _Attempt:
    """The containers of all hosts, from start to end."""

    def __init__(
        self,
        run: Run,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        show: Show,
        received: list[int],
    ) -> None:
        self._run = run
        self._show = show
        self._received = received
        self._arguments = arguments
        self._variables = variables
        self._lock = threading.Lock()
        self._spoke_at: float | None = None
        self.rehearsed = False

    def play(self, interrupt_after: float | None) -> dict[str, int]:
        """Start the containers and wait for all; return their exit codes by host."""
        lay_out(self._run)
        processes = {host: self._start(host) for host in self._run.hosts}
        readers = [
            threading.Thread(target=self._read, args=(host.name, stream, pipe), daemon=True)
            for host, process in processes.items()
            for stream, pipe in (("out", process.stdout), ("err", process.stderr))
        ]
        for reader in readers:
            reader.start()
        self._wait(list(processes.values()), interrupt_after)
        for reader in readers:
            reader.join(timeout=10)
        return {host.name: process.returncode for host, process in processes.items()}

    def _start(self, host: Host) -> subprocess.Popen[bytes]:
        command = start_command(self._run, host, self._arguments, self._variables)
        # In a session of its own, so that Ctrl-C reaches it only through us, as a stop with a grace period.
        return subprocess.Popen(
            command.words,
            env=command.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def _read(self, host: str, stream: str, pipe: IO[bytes]) -> None:
        for line in pipe:
            with self._lock:
                # What starts the ranks speaks, too, on stderr: on a busy machine long before the script is at work.
                if stream == "out" or line.startswith(b"[rank ") or self._run.plan.job.is_shell_script:
                    self._spoke_at = self._spoke_at or time.monotonic()
                self._show(host, stream, line.decode("utf-8", errors="replace").rstrip("\r\n"))
        pipe.close()

    def _wait(self, processes: Sequence[subprocess.Popen[bytes]], interrupt_after: float | None) -> None:
        deadline: float | None = None
        stops: list[subprocess.Popen[bytes]] = []
        told = 0
        while any(process.poll() is None for process in processes):
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if len(self._received) > told:
                told = len(self._received)
                stops += self._tell("stop" if told == 1 else "kill")
            elif interrupt_after is not None and self._spoke_at is not None and now >= self._spoke_at + interrupt_after:
                interrupt_after, self.rehearsed = None, True
                stops += self._tell("stop")
            elif deadline is None and not stops and any(process.poll() for process in processes):
                deadline = now + _FOLLOW_SECONDS
            elif deadline is not None and now >= deadline:
                deadline = float("inf")
                stops += self._tell("kill")
        for stop in stops:
            stop.wait()

    def _tell(self, verb: str) -> list[subprocess.Popen[bytes]]:
        """Stop or kill all containers at once: one after another, each could take the whole grace period."""
        options = ["--time", str(STOP_SECONDS)] if verb == "stop" else []
        return [
            subprocess.Popen(
                ["docker", verb, *options, host.container], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for host in self._run.hosts
        ]


def _prepared(plan: LocalPlan, image: str, folder: Path, gpus: bool) -> Run:
    tree = Path(tempfile.mkdtemp(prefix=f"smpkit-{plan.job.name}-")).resolve()
    name = f"smpkit-{plan.job.name[:30].lower()}-{secrets.token_hex(4)}"
    hosts = tuple(
        Host(f"algo-{number}", f"{name}-algo-{number}", tree / f"algo-{number}") for number in range(1, plan.hosts + 1)
    )
    return Run(plan, image, name, tree, hosts, (plan.checkpoints or folder / CHECKPOINTS).absolute(), gpus)


def _forget(run: Run) -> None:
    """Take away all that a host loses when its machine is taken away: everything but the checkpoints."""
    quietly([("rm", "--force", *(host.container for host in run.hosts))])
    _own(run)
    for host in run.hosts:
        shutil.rmtree(host.folder, ignore_errors=True)


def _own(run: Run) -> None:
    """Give what the containers wrote as root to the user who started them."""
    if os.getuid() == 0:
        return
    owner = f"{os.getuid()}:{os.getgid()}"
    folders = {run.tree, run.checkpoints}
    mounts = [word for path in folders for word in ("--mount", f"type=bind,source={path},target=/mnt{path}")]
    places = [f"/mnt{path}" for path in folders]
    quietly([("run", "--rm", *mounts, "--entrypoint", "chown", run.image, "-R", owner, *places)])


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask for an end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _collected(
    run: Run, folder: Path, codes: Mapping[str, int], seconds: float, interrupted: bool, rehearsed: bool
) -> DockerRun:
    for host in run.hosts:
        records = host.folder / "output" / "data" / _RECORDS
        merge([(host.name, records)], folder)
        shutil.rmtree(records, ignore_errors=True)
    places = {"model": folder / "model", "output/data": folder / "output"}
    if run.plan.output is not None:
        places = {"model": run.plan.output / "model", "output/data": run.plan.output / "data"}
    clashes = [
        clash
        for part, place in places.items()
        for clash in merge([(host.name, host.folder / part) for host in run.hosts], place)
    ]
    failures = [host.folder / "output" / "failure" for host in run.hosts if codes[host.name]]
    failure = next((path.read_text(errors="replace") for path in failures if path.is_file()), None)
    bad = [code for code in codes.values() if code]
    if _DOCKER_FAILED in bad and failure is None:
        raise LaunchError("a container could not be started; Docker's own words are above")
    return DockerRun(
        exit_code=bad[0] if bad else 0,
        seconds=seconds,
        interrupted=interrupted,
        rehearsed=rehearsed,
        failure=failure,
        model=_filled(places["model"]),
        output_data=_filled(places["output/data"]),
        checkpoints=_filled(run.checkpoints),
        clashes=tuple(clashes),
    )


def _filled(folder: Path) -> Path | None:
    return folder if folder.is_dir() and any(folder.iterdir()) else None


def merge(sources: Sequence[tuple[str, Path]], target: Path) -> list[str]:
    """Copy the files below several folders into one.

    Returns:
        The files that hosts wrote with different contents, each with who wrote it: SageMaker keeps one of them, and
        nobody knows which. Here the first host's is kept.
    """
    clashes = []
    for host, folder in sources:
        for path in sorted(folder.rglob("*")):
            if path.is_dir() or path.is_symlink():
                continue
            place = target / path.relative_to(folder)
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)
            elif not filecmp.cmp(path, place, shallow=False):
                clashes.append(f"{path.relative_to(folder)} (of {host})")
    return clashes
