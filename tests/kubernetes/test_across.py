"""Commands that know several back ends: going on elsewhere, listing all jobs, counting node-hours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from smpkit.config.backend import Slurm
from smpkit.testing import FakeKubernetes
from tests.job_contract import uninterrupted
from tests.kubernetes.conftest import PIPELINE, User

__all__ = ["PIPELINE"]


@pytest.mark.slow
def test_a_job_goes_on_in_another_cluster(user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in one, resumed from the same folder in another one, with JobSets, by a job file for there."""
    user.write(distribution=PIPELINE, hyperparameters={"steps": 6, "seconds": 0.3})
    user.run("submit", "job.yaml", "--name", "old")
    user.until_logged("old", "step 2 on")
    user.run("stop", "old", "--wait")
    with FakeKubernetes(jobset=True, namespace="other") as cluster:
        one, two = (json.loads(each.write_kubeconfig(tmp_path / "any").read_text()) for each in (user.cluster, cluster))
        for part in ("clusters", "users", "contexts"):
            two[part][0]["name"] = "second"
            one[part] += two[part]
        one["contexts"][1]["context"] |= {"cluster": "second", "user": "second"}
        (tmp_path / "any").write_text(json.dumps(one))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "any"))
        job = yaml.safe_load((user.folder / "job.yaml").read_text())
        del job["checkpoints"]
        job["backend"]["kubernetes"]["context"] = "second"
        (user.folder / "there.yaml").write_text(yaml.safe_dump(job))
        resumed = user.run(
            "resume", "old", "--with", "there.yaml", "--name", "new", "--set", "hyperparameters.seconds=0"
        )
        assert f"Resuming from {user.shared / 'checkpoints'}" in resumed.stderr
        assert "stop with `smpkit stop new --backend kubernetes`" in resumed.stderr
        user.run("wait", "new", "--profile", "second")
        assert cluster.pods("new")[0].startswith("new-hosts-0-")
        assert (user.shared / "out" / "new" / "model" / "losses.txt").read_text() == uninterrupted()


def test_where_the_checkpoints_are_not_reachable_the_other_back_end_says_so(user: User) -> None:
    user.write("", quick=True, hosts=1)
    user.run("submit", "job.yaml", "--name", "old", "--wait")
    refused = user.run("resume", "old", "--with", "job.yaml", code=1)
    assert f"there is no checkpoint of `old` at {user.shared / 'checkpoints'}, as Kubernetes" in refused.stderr
    moved = ["--set", "backend.kubernetes.volumes=[{mount: /data, claim: a}]", "--set", "output=/data/out"]
    refused = user.run("resume", "old", "--with", "job.yaml", *moved, code=2)
    assert "checkpoints.uri: lies in no volume of the containers" in refused.stderr
    refused = user.run("resume", "old", "--with", "job.yaml", "--to", "sagemaker", "--set", "role=r", code=2)
    assert "checkpoints.uri: is a folder of this machine" in refused.stderr
    assert "`--to` and `--set` need `--with`" in user.run("resume", "old", "--to", "slurm", code=2).stderr
    refused = user.run("resume", "old", "--with", "job.yaml", "--instance-count", "2", code=2)
    assert "`--with` takes hosts and limits from its job file" in refused.stderr


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
    user.cluster.close()
    done = user.run("jobs", "--backend", "all")
    assert (done.stdout, "note: without those of `kubernetes`: " in done.stderr) == ("", True)


@pytest.mark.parametrize(
    ("backend", "machines", "node_hours"),
    [
        ({"slurm": {"partition": "gpu", "time": "1-12"}}, "2 × gpu × 36.00 h", 72),
        ({"slurm": {"array": [{"lr": 1}, {"lr": 2}], "time": "90"}}, "4 × slurm × 1.50 h", 6),
        ({"kubernetes": {}}, "2 × pod × 10.00 h", 20),
        ({"batch": {"instance_type": "p5.48xlarge"}}, "2 × p5.48xlarge × 10.00 h", 20),
    ],
    ids=["slurm", "array", "kubernetes", "batch"],
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
