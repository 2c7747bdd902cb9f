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
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:00:00", 7200), ("3-12", 302_400), ("1-0:30:05", 88_205), ("UNLIMITED", None)],
)
def test_slurms_times(time: str, seconds: int | None) -> None:
    assert Slurm(time=time).seconds == seconds
