"""Commands that know several back ends: listing all jobs, counting node-hours."""

from __future__ import annotations

import json

import pytest

from smpkit.config.backend import Slurm
from smpkit.errors import UnreachableError
from tests.kubernetes.conftest import User


def test_the_jobs_of_all_back_ends_are_listed_together(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no Slurm
    user.write("", quick=True, hosts=1)
    user.run("submit", "job.yaml", "--name", "here")
    done = user.run("jobs", "--backend", "all", "--json")
    [item] = json.loads(done.stdout)
    assert (item["backend"], item["name"]) == ("kubernetes", "here")
    for name in ("sagemaker", "batch"):
        assert f"note: without those of `{name}`: no AWS region is set" in done.stderr
    assert user.run("jobs", "--backend", "all").stdout.startswith("here  kubernetes  ")
    monkeypatch.setattr(user.cluster, "list", lambda *_: unreachable())
    done = user.run("jobs", "--backend", "all")
    assert (done.stdout, "note: without those of `kubernetes`: " in done.stderr) == ("", True)


def unreachable() -> None:
    raise UnreachableError("no answer")


@pytest.mark.parametrize(
    ("backend", "machines", "node_hours"),
    [
        ({"slurm": {"partition": "gpu", "time": "1-12"}}, "2 × gpu × 36.00 h", 72),
        ({"slurm": {"time": "90"}}, "2 × slurm × 1.50 h", 3),
        ({"kubernetes": {}}, "2 × pod × 10.00 h", 20),
        ({"batch": {"instance_type": "p5.48xlarge"}}, "2 × p5.48xlarge × 10.00 h", 20),
    ],
    ids=["slurm", "slurm alone", "kubernetes", "batch"],
)
def test_cost_counts_node_hours(
    user: User, monkeypatch: pytest.MonkeyPatch, backend: dict[str, object], machines: str, node_hours: float
) -> None:
    monkeypatch.delenv("SMPKIT_BACKEND")
    user.write("", compute={"instance_count": 2, "max_run_seconds": 36_000}, backend=backend)
    assert machines in user.run("cost", "job.yaml", "--price", "2").stdout
    found = json.loads(user.run("cost", "job.yaml", "--price", "2", "--json").stdout)
    assert (found["node_hours"], found["estimate"]) == (node_hours, 2 * node_hours)
    assert user.run("cost", "job.yaml").stdout == f"{node_hours:.2f} node-hours (estimate, at most): {machines}\n"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("3-12", 302_400), ("1-0:30:05", 88_205), ("UNLIMITED", None)],
)
def test_slurms_times(time: str, seconds: int | None) -> None:
    assert Slurm(time=time).seconds == seconds
