"""What a job looks like wherever it runs: the same commands, answers and exit codes, and the same losses.

The tests of Slurm, Kubernetes, AWS Batch and SageMaker call those of managed jobs, each with its own way to run
`smpkit`; where ranks are real, on Slurm, Kubernetes, SageMaker and under `smpkit run`, tests call the others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml
from click.testing import CliRunner, Result

from smpkit.cli.main import cli

SCRIPT = Path(__file__).parent / "docker" / "job" / "train.py"
"""A pipeline's training that prints each step, saves when it is asked to stop, and goes on."""

PIPELINE: dict[str, Any] = {
    "smdistributed": {
        "modelparallel": {
            "enabled": True,
            "parameters": {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True},
        }
    },
    "torch_distributed": {"enabled": True, "processes_per_host": 1},
}

Run = Callable[..., Any]
"""Calls `smpkit`, checks its exit code (`code`, 0 by default), and returns what it printed as `stdout` and `stderr`."""


def in_this_process(*arguments: str, code: int = 0) -> Result:
    """Be a `Run` without a process of its own."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == code, f"smpkit {arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    return done


class Client(ABC):
    """Somebody who calls `smpkit`, looks at jobs and waits for something."""

    @abstractmethod
    def run(self, *arguments: str, code: int = 0) -> Any:
        """Be a `Run`."""

    @abstractmethod
    def told(self) -> str:
        """What there is to know after a failure."""

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", name, "--json").stdout)
        return found

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}\n{self.told()}"
            time.sleep(0.05)


def a_job_that_succeeds(run: Run, name: str, hosts: tuple[str, str], rank: int = 1) -> None:
    """Send the job file of this folder, a job of two hosts, and follow it to its end.

    Args:
        hosts: what the back end calls the two hosts.
        rank: a rank of the second host, which prints something.
    """
    sent = run("submit", "job.yaml", "--name", name)
    assert sent.stdout == f"{name}\n"
    assert "Submitting `" in sent.stderr
    assert f"Follow with `smpkit logs -f {name}" in sent.stderr
    watched = [json.loads(line) for line in run("status", name, "--watch", "--json").stdout.splitlines()]
    assert watched[-1]["status"] == "Completed"
    waited = run("status", name, "--watch")
    assert waited.stdout.startswith("Completed after ")
    status = json.loads(run("status", name, "--json").stdout)
    assert (status["name"], status["status"], status["over"], status["failure"]) == (name, "Completed", True, None)
    assert status["instance_count"] == 2
    assert run("status", name).stdout.startswith("Completed after ")
    lines = [json.loads(line) for line in run("logs", "-f", name, "--rank", str(rank), "--json").stdout.splitlines()]
    assert {(line["host"], line["rank"]) for line in lines} == {(hosts[1], rank)}
    assert run("logs", name, "--tail", "1", "--host", hosts[0]).stdout.startswith(f"{hosts[0]} ")
    found = json.loads(run("jobs", "--json", "--status", "completed").stdout)
    assert [(item["name"], item["status"]) for item in found if item["name"] == name] == [(name, "Completed")]
    assert f"`{name}` is over already: Completed" in run("stop", name).stderr
    missing = run("status", "none", code=2)
    assert "there is no job `none`" in missing.stderr


def a_job_that_fails(run: Run, name: str, headline: str, host: str, rank: int = 1) -> None:
    """Send the job file of this folder, of which one rank raises, and follow it to its end."""
    done = run("submit", "job.yaml", "--name", name, "--follow", code=1)
    assert done.stdout.startswith(f"{name}\n")
    assert "Failed after " in done.stderr
    assert f"(rank {rank} on {host}, exit 1)" in done.stderr
    status = json.loads(run("status", name, "--json").stdout)
    failure = status["failure"]
    assert (status["status"], failure["headline"]) == ("Failed", headline)
    assert (failure["rank"], failure["host"], failure["exit_code"]) == (rank, host, 1)
    waited = run("status", name, "--watch", code=1)
    assert headline in waited.stdout
    assert f"`{name}` is over already: Failed" in run("stop", name).stderr


def a_long_log_is_followed_whole(run: Run, host: str, lines: int) -> None:
    """Send the job file of this folder, whose two ranks print `line RANK NUMBER` so often; `host` is the second's."""
    done = run("submit", "job.yaml", "--name", "long", "--follow")
    for rank in range(2):
        numbers = re.findall(rf"\[rank {rank}\] line {rank} (\d+)$", done.stdout, re.MULTILINE)
        assert [int(number) for number in numbers] == list(range(lines))
    tail = run("logs", "long", "--host", host, "--tail", "2").stdout.splitlines()
    assert tail == [f"{host} [rank 1] line 1 {number}" for number in (lines - 2, lines - 1)]


def a_report_of_it(run: Run, name: str, steps: int = 6) -> None:
    """Write the report of a job of `SCRIPT`, wherever it left what its ranks measured."""
    told = run("report", name, "--json")
    found = json.loads(told.stdout)
    assert found["name"] == name
    [curve] = [each for each in found["curves"] if each["name"] == "loss"]
    assert curve["steps"] == list(range(steps - len(curve["steps"]) + 1, steps + 1))
    assert run("report", name).stdout == f"report-{name}.html\n"


# ---- what ranks do, where they are real --------------------------------------------------------------------------


class Place(Protocol):
    """Somewhere that runs `SCRIPT` on two hosts of one rank."""

    def stop_in_the_middle(self, name: str) -> str:
        """Start six steps, ask the job to stop after the second, and return its log when it is over."""

    def go_on(self, name: str, new: str) -> str:
        """Run the rest of the steps; return the log."""

    def losses(self, name: str) -> str:
        """Return the file that the script leaves beside its model."""


def a_job_that_is_stopped_goes_on(place: Place) -> None:
    """SIGTERM, saved, and the same losses as without."""
    assert "step 6 on" not in place.stop_in_the_middle("old")
    log = place.go_on("old", "new")
    assert "resumed at step" in log
    assert "step 1 on" not in log
    assert place.losses("new") == uninterrupted()


def uninterrupted() -> str:
    """The losses of six steps in this process: mean over two microbatches of a batch of four."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for step in range(6):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step))
        optimizer.zero_grad()
        parts = [(model(x) - x).square().mean() for x in batch.chunk(2)]
        for part in parts:
            (part / 2).backward()
        optimizer.step()
        found.append(torch.stack([part.detach() for part in parts]).mean().item())
    return "".join(f"{loss:.12f}\n" for loss in found)


@dataclass
class OnCluster:
    """A back end for managed jobs; `user` writes job files and calls `smpkit`."""

    user: Any
    read: Callable[[str], str]

    def stop_in_the_middle(self, name: str) -> str:
        self.user.write(distribution=PIPELINE, hyperparameters={"steps": 6, "hold-at": 3})
        self.user.run("submit", "job.yaml", "--name", name)
        self.user.until_logged(name, "step 2 on")
        stopped = self.user.run("stop", name, "--wait")
        assert "newest checkpoint: " in stopped.stderr
        assert self.user.status(name)["status"] == "Stopped"
        self.user.run("status", name, "--watch", code=1)
        return str(self.user.told())

    def go_on(self, name: str, new: str) -> str:
        resumed = self.user.run("resume", name, "--name", new, "--follow")
        assert "Resuming from " in resumed.stderr
        return str(resumed.stdout)

    def losses(self, name: str) -> str:
        return self.read(name)


@dataclass
class OnThisMachine:
    """`smpkit run`, in a folder."""

    folder: Path
    options: tuple[str, ...] = ()
    job: dict[str, Any] = field(default_factory=dict)

    def stop_in_the_middle(self, name: str) -> str:
        process = self.start(name, **{"steps": 6, "hold-at": 3})
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if "step 2 on" in line:
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=300)
        assert "saved and stopping" in out, f"{seen}{out}\n{err}"
        return seen + out

    def go_on(self, name: str, new: str) -> str:
        process = self.start(new, steps=6)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{out}\n{err}"
        return out

    def losses(self, name: str) -> str:
        return (self.folder / "out" / name / "model" / "losses.txt").read_text()

    def start(self, name: str, **values: Any) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(SCRIPT.read_text())
        whole = {
            "name": name,
            "entry_point": "train.py",
            "output": str(self.folder / "out" / name),
            "checkpoints": str(self.folder / "checkpoints"),
            "compute": {"instance_count": 2},
            "distribution": PIPELINE,
            "hyperparameters": values,
            **self.job,
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump(whole))
        command = [str(Path(sys.executable).with_name("smpkit")), "run", "job.yaml", *self.options]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "SMPKIT_SETTLE_SECONDS": "0.5"}
        return subprocess.Popen(
            command, cwd=self.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
