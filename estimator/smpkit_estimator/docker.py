"""Run a job in containers on this machine, one for each host, by plain `docker` commands.

Every user of Docker has set its command line up already. Hosts share the places for results, which are one place on
SageMaker, too: of files that several hosts write under one name, the last one stays.
"""

from __future__ import annotations

import csv
import io
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from smpkit.errors import LaunchError
from smpkit.observe.runs import EVENTS, RUN_DIR
from smpkit_estimator.local import LocalPlan, LocalRun, platform_files, write_files

Show = Callable[[str, str, str], object]
"""Called with a host, `out` or `err`, and a line of its output."""

_COMMAND_SECONDS = 120.0
_STOP_SECONDS = 120
"""Between SIGTERM and SIGKILL, as on SageMaker."""
_POLL_SECONDS = 0.1
_AGAIN_SECONDS = 1.0
"""Until a signal is sent again: before a container has its launcher, none arrives."""
_FOLLOW_SECONDS = 60.0
"""For the other hosts to end after one failed; they learn of it within seconds."""
_DOCKER_FAILED = 125
_CODE = "/opt/ml/code"
_RUN = "/opt/ml/run"
"""Where containers see the folder of the run."""


def check() -> None:
    """Find out whether there is an engine before anything is made."""
    if shutil.which("docker") is None:
        raise LaunchError("`docker` was not found", hint="install Docker, or run the job without `--docker`")
    docker("version", "--format", "{{.Server.Version}}", seconds=30, why="the Docker engine does not answer")


def docker(*arguments: str, seconds: float = _COMMAND_SECONDS, why: str = "") -> str:
    """Run one docker command and return what it printed; an error says `why` before what it said."""
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`docker {arguments[0]}` did not end within {seconds:g} s") from None
    except OSError as error:
        raise LaunchError(f"`docker` could not be run: {error}") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip()
        raise LaunchError(
            f"{why or f'`docker {arguments[0]}` failed'}: {words.splitlines()[-1] if words else 'silently'}"
        )
    return done.stdout.strip()


class Containers:
    """The containers of a run, one for each host, on a network of their own.

    Args:
        folder: that of the run, which exists; for results where the job file names no place.
        show: is given the output, line by line, from several threads but one at a time.
    """

    def __init__(
        self,
        plan: LocalPlan,
        image: str,
        folder: Path,
        arguments: Sequence[str] = (),
        *,
        show: Show = print,
        gpus: bool = False,
        events: bool = False,
    ) -> None:
        folder = folder.absolute()
        self.name = f"smpkit-{plan.job.name[:30].lower()}-{secrets.token_hex(4)}"
        self._interrupted = False
        self._plan, self._image, self._folder, self._show, self._gpus = plan, image, folder, show, gpus
        self._script = ["--", *arguments] if arguments else []
        self._variables = {
            **plan.job.variables,
            **plan.secrets,
            "TRAINING_JOB_NAME": self.name,
            "TRAINING_JOB_ARN": f"arn:aws:sagemaker:local:000000000000:training-job/{self.name}",
            RUN_DIR: _RUN,
            **({"SMPKIT_EVENTS_DIR": f"{_RUN}/{EVENTS}"} if events else {}),
        }
        self.hosts = {name: folder / "hosts" / name for name in (f"algo-{n}" for n in range(1, plan.hosts + 1))}
        """What each has for itself: its description and its failure file."""
        self.places = plan.places(folder)
        self._lock = threading.Lock()
        self._spoke_at: float | None = None

    def run(self, interrupt_after: float | None = None) -> LocalRun:
        """Run the job and wait for it. Must be called in the main thread: it handles SIGINT, SIGTERM and SIGHUP.

        The first of these asks the ranks to end as SageMaker does (SIGTERM, 120 s later SIGKILL), a second one kills
        them.

        Args:
            interrupt_after: seconds after the first line of the script until the containers are stopped as if spot
                instances were taken away; new ones then go on with nothing but the checkpoints.
        """
        began, rehearsed = time.monotonic(), False
        try:
            docker("network", "create", self.name)
            with _signals() as received:
                codes = self._play(received, interrupt_after)
                if self._interrupted and not received:
                    rehearsed = True
                    self._remove()
                    codes = self._play(received, None)
            bad = next((code for code in codes.values() if code), 0)
            failures = [self.hosts[host] / "output" / "failure" for host, code in codes.items() if code]
            failure = next((path.read_text(errors="replace") for path in failures if path.is_file()), None)
            if bad == _DOCKER_FAILED and failure is None:
                raise LaunchError("a container could not be started; Docker's own words are above")
        finally:
            self._remove()
            _quietly("network", "rm", self.name)
            self._give_back()
            shutil.rmtree(self._folder / "hosts", ignore_errors=True)
        model, output, checkpoints = map(_filled, self.places.values())
        seconds = time.monotonic() - began
        return LocalRun(bad, seconds, failure, model, output, checkpoints, bool(received), rehearsed)

    def _play(self, received: Sequence[int], interrupt_after: float | None) -> dict[str, int]:
        """Start a container for each host and wait for all; return their exit codes by host.

        Args:
            received: the signals that came, which grow while this waits.
        """
        self._spoke_at, self._interrupted = None, False
        self.lay_out()
        # In sessions of their own, so that Ctrl-C reaches them only through us, as a stop with a grace period.
        processes = {
            host: subprocess.Popen(
                self.command(host), env={**os.environ, **self._variables}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )
            for host in self.hosts
        }  # fmt: skip
        readers = [
            threading.Thread(target=self._read, args=(host, stream, pipe), daemon=True)
            for host, process in processes.items()
            for stream, pipe in (("out", process.stdout), ("err", process.stderr))
        ]
        for reader in readers:
            reader.start()
        self._wait(list(processes.values()), received, interrupt_after)
        for reader in readers:
            reader.join(timeout=10)
        return {host: process.returncode for host, process in processes.items()}

    def lay_out(self) -> None:
        if self._plan.dependencies and not self._code.exists():
            for path in (*self._plan.source.iterdir(), *self._plan.dependencies):
                # Links would lead nowhere inside a container.
                self._code.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, self._code / path.name)
        for place in self.places.values():
            place.mkdir(parents=True, exist_ok=True)
        for host, own in self.hosts.items():
            shutil.rmtree(own, ignore_errors=True)
            (own / "output").mkdir(parents=True)
            hosts = list(self.hosts)
            files = platform_files(
                self._plan, self.name, hosts, host, code=_CODE, checkpoints="/opt/ml/checkpoints", interface="eth0"
            )
            write_files(own / "config", files)

    @property
    def _code(self) -> Path:
        """The sources: where they are, or with the job's dependencies beside them, in a copy."""
        return self._folder / "hosts" / "code" if self._plan.dependencies else self._plan.source

    def command(self, host: str) -> list[str]:
        """Return the command that runs a host's container in the foreground.

        As on SageMaker, the container's own host name is not the one by which the other hosts reach it. A program that
        confuses the two fails here, too.
        """
        own, container = self.hosts[host], f"{self.name}-{host}"
        mounts = [
            (self._code, _CODE, True),
            (own / "config", "/opt/ml/input/config", True),
            (own / "output", "/opt/ml/output", False),
            *((place, f"/opt/ml/{part}", False) for part, place in self.places.items()),
            (self._folder, _RUN, False),
            *((path, f"/opt/ml/input/data/{name}", True) for name, path in self._plan.inputs.items()),
        ]
        return [
            *("docker", "run", "--init=false", "--name", container, "--label", f"smpkit.run={self.name}"),
            *("--network", self.name, "--network-alias", host, "--hostname", f"ip-{container[-12:]}"),
            *("--shm-size", "8g", "--stop-timeout", str(_STOP_SECONDS)),
            # Pinned memory counts as locked; an engine inside a container may not be allowed to raise the limit.
            *(("--gpus", "all", "--ulimit", "memlock=-1") if self._gpus else ()),
            *(word for mount in mounts for word in ("--mount", _mount(*mount))),
            # By name only: every user of this machine can read the arguments of a command, but not its environment.
            *(word for name in self._variables for word in ("--env", name)),
            *(self._image, "train", *self._script),
        ]

    def _read(self, host: str, stream: str, pipe: IO[bytes]) -> None:
        for line in pipe:
            with self._lock:
                # What starts the ranks speaks, too, on stderr: on a busy machine long before the script is at work.
                if stream == "out" or line.startswith(b"[rank ") or self._plan.job.is_shell_script:
                    self._spoke_at = self._spoke_at or time.monotonic()
                self._show(host, stream, line.decode("utf-8", errors="replace").rstrip("\r\n"))
        pipe.close()

    def _wait(
        self, processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int], interrupt_after: float | None
    ) -> None:
        signal_name, again, deadline = "", 0.0, float("inf")
        request: subprocess.Popen[bytes] | None = None
        while any(process.poll() is None for process in processes):
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            rehearses = interrupt_after is not None and now >= (self._spoke_at or now) + interrupt_after
            if signal_name != "KILL" and (len(received) > 1 or now >= deadline):
                signal_name, again, deadline = "KILL", now, now + _COMMAND_SECONDS
            elif signal_name == "KILL" and now >= deadline:
                for process in (*processes, *filter(None, [request])):
                    process.kill()
                    process.wait()
                message = f"the Docker engine did not end the containers within {_COMMAND_SECONDS:g} s of SIGKILL"
                raise LaunchError(message, hint="`docker ps` shows whether it answers")
            elif not signal_name and (received or rehearses):
                self._interrupted = not received
                signal_name, again, deadline = "TERM", now, now + _STOP_SECONDS
            elif deadline == float("inf") and not signal_name and any(process.poll() for process in processes):
                deadline = now + _FOLLOW_SECONDS
            if signal_name and now >= again and (request is None or request.poll() is not None):
                again = now + _AGAIN_SECONDS
                command = ["docker", "kill", f"--signal={signal_name}", *self._containers]
                request = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if request is not None:  # nothing is left that it could end
            request.kill()
            request.wait()

    @property
    def _containers(self) -> list[str]:
        return [f"{self.name}-{host}" for host in self.hosts]

    def _remove(self) -> None:
        """Take away the containers, and all that a host loses with its machine: everything but the results."""
        _quietly("rm", "--force", *self._containers)

    def _give_back(self) -> None:
        """Give what the containers wrote as root to the user who started them."""
        if os.getuid() == 0:
            return
        folders = {self._folder, *self.places.values()}
        mounts = [word for path in folders for word in ("--mount", _mount(path, f"/mnt{path}", read_only=False))]
        places = [f"/mnt{path}" for path in folders]
        owner = f"{os.getuid()}:{os.getgid()}"
        _quietly("run", "--rm", *mounts, "--entrypoint", "chown", self._image, "-R", owner, *places)


def _quietly(*arguments: str) -> None:
    """Run a command whose failure changes nothing: what is to be removed may be gone already."""
    with suppress(LaunchError):
        docker(*arguments)


def _mount(source: Path, target: str, read_only: bool) -> str:
    """Return the value of `--mount`, which is a line of CSV: a comma or a quote in a path must not end it."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else [])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask for an end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of which `nohup` ignores the last
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _filled(folder: Path) -> Path | None:
    """Return a folder with anything in it; one that stayed empty goes."""
    if any(folder.iterdir()):
        return folder
    with suppress(OSError):  # what is around it is not empty
        folder.rmdir()
        folder.parent.rmdir()
    return None
