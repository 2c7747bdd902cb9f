"""Helpers of the launcher's tests: write a job below a folder, start the launcher on it, look for what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.leftovers import processes_with

LAUNCHERS = ("torchrun", "mpirun")


@dataclass
class Finished:
    """What a launcher left: exit code, output, failure file, time."""

    code: int
    out: str
    err: str
    failure: str
    seconds: float

    def lines(self, rank: int) -> list[str]:
        prefix = f"[rank {rank}] "
        return [line.removeprefix(prefix) for line in self.out.splitlines() if line.startswith(prefix)]


@dataclass
class Job:
    """A job below `base`, whose script is `source`; every process of it carries `base` in its environment."""

    base: Path
    launcher: str
    source: str | None
    ranks: int = 2
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    script: str = "train.py"
    python: str = sys.executable

    def __post_init__(self) -> None:
        config, code = self.base / "input" / "config", self.base / "code"
        config.mkdir(parents=True)
        code.mkdir(parents=True, exist_ok=True)
        if self.source is not None:
            (code / self.script).write_text(self.source, encoding="utf-8")
        is_mpi = self.launcher == "mpirun"
        values = {
            "sagemaker_program": self.script,
            "sagemaker_mpi_enabled": is_mpi,
            "sagemaker_mpi_num_of_processes_per_host" if is_mpi else "sagemaker_smpkit_processes_per_host": self.ranks,
            **self.hyperparameters,
        }
        encoded = {name: json.dumps(value) for name, value in values.items()}
        (config / "hyperparameters.json").write_text(json.dumps(encoded), encoding="utf-8")

    def start(self) -> subprocess.Popen[str]:
        """Start the launcher; its output is collected by `finish`."""
        environ = {
            **os.environ,
            "SMPKIT_BASE_DIR": str(self.base),
            "SMPKIT_TEST_MARK": str(self.base),
            "OMP_NUM_THREADS": "1",
            "SMPKIT_SETTLE_SECONDS": "0.5",  # enough for two ranks, and the tests are many
            **self.environ,
        }
        command = [self.python, "-m", "smpkit_container", "train"]
        if self.arguments:
            command += ["--", *self.arguments]
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def finish(self, process: subprocess.Popen[str]) -> Finished:
        """Wait for the launcher and check that nothing of its job is left; the seconds are those of waiting."""
        began = time.monotonic()
        try:
            out, err = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"the launcher hung\n{out}\n{err}") from None
        seconds = time.monotonic() - began
        self.assert_nothing_left()
        failure = self.base / "output" / "failure"
        text = failure.read_text(encoding="utf-8") if failure.exists() else ""
        return Finished(process.returncode, out, err, text, seconds)

    def run(self) -> Finished:
        return self.finish(self.start())

    @contextmanager
    def running(self, until: str = "ready") -> Iterator[subprocess.Popen[str]]:
        """Start the launcher and wait until every rank has written the file `<until>-<rank>` beside the script."""
        with self.start() as process:
            try:
                self.wait_for_files(until)
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def stopped_by(self, number: int) -> Finished:
        """Run it until all ranks are ready, and send the launcher a signal; the seconds are those after that."""
        with self.running() as process:
            process.send_signal(number)
            return self.finish(process)

    def wait_for_files(self, name: str, timeout: float = 150) -> None:
        deadline = time.monotonic() + timeout
        while not all((self.base / "code" / f"{name}-{rank}").exists() for rank in range(self.ranks)):
            assert time.monotonic() < deadline, f"the ranks never wrote their `{name}` files"
            time.sleep(0.02)

    def assert_nothing_left(self, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while left := self.processes():
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"processes were left behind: {left}")
            time.sleep(0.02)

    def listening(self) -> dict[str, str]:
        """Return address as the kernel writes it -> command line of every port at which this job listens (Linux)."""
        sockets: dict[str, str] = {}
        for table in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
            sockets |= {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
        found: dict[str, str] = {}
        for pid, command in self.processes().items():
            links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
            found |= {sockets[link]: command for link in links if link in sockets}
        return found

    def processes(self) -> dict[int, str]:
        """Return pid -> command line of every living process of this job (Linux)."""
        found = {}
        for pid in processes_with(f"SMPKIT_TEST_MARK={self.base}"):
            with suppress(OSError):  # it ended meanwhile
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found
