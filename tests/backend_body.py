"""What a managed job looks like on every back end: the same commands, answers and exit codes.

The tests of Slurm, Kubernetes, AWS Batch and the fake of SageMaker call these, each with its own way to run `smpkit`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["a_job_that_fails", "a_job_that_succeeds"]

Run = Callable[..., Any]
"""Calls `smpkit`, checks its exit code (`code`, 0 by default), and returns what it printed as `stdout` and `stderr`."""


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
    waited = run("wait", name)
    assert (waited.stdout, "Completed" in waited.stderr) == ("", True)
    status = json.loads(run("status", name, "--json").stdout)
    assert (status["name"], status["status"], status["over"], status["failure"]) == (name, "Completed", True, None)
    assert status["instance_count"] == 2
    assert run("status", name).stdout.startswith("Completed after ")
    lines = [json.loads(line) for line in run("logs", name, "--rank", str(rank), "--json").stdout.splitlines()]
    assert {(line["host"], line["rank"]) for line in lines} == {(hosts[1], rank)}
    assert run("logs", name, "--tail", "1", "--host", hosts[0]).stdout.startswith(f"{hosts[0]} ")
    found = json.loads(run("jobs", "--json", "--status", "completed").stdout)
    assert [(item["name"], item["status"]) for item in found if item["name"] == name] == [(name, "Completed")]
    assert f"`{name}` is over already: Completed" in run("stop", name).stderr
    assert "(estimate, billable time): 2 × " in run("cost", name, "--price", "3").stdout
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
    waited = run("wait", name, code=1)
    assert (waited.stdout, headline in waited.stderr) == ("", True)
    assert f"`{name}` is over already: Failed" in run("stop", name).stderr
