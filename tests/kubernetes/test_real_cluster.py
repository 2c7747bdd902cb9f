"""Jobs on a real cluster, for somebody who has one: `scripts/test-kubernetes IMAGE`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.job_contract import PIPELINE, SCRIPT
from tests.slurm.test_slurm import FAILS

# Taken before the environment is scrubbed.
IMAGE = os.environ.get("SMPKIT_TEST_KUBERNETES_IMAGE", "")
NAMESPACE = os.environ.get("SMPKIT_TEST_KUBERNETES_NAMESPACE", "")

pytestmark = [
    pytest.mark.skipif(not IMAGE, reason="needs a cluster: `scripts/test-kubernetes IMAGE`"),
    pytest.mark.timeout(1200),
]


class User:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def run(self, *arguments: str, code: int = 0) -> str:
        place = ["--backend", "kubernetes", *(["--region", NAMESPACE] if NAMESPACE else [])]
        command = [str(Path(sys.executable).with_name("smpkit")), *arguments, *place]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, **job: object) -> str:
        (self.folder / "train.py").write_text(script)
        ranks = {"torch_distributed": {"enabled": True, "processes_per_host": 1}}
        whole = {"entry_point": "train.py", "image": IMAGE, "compute": {"instance_count": 2}, "distribution": ranks}
        (self.folder / "job.yaml").write_text(yaml.safe_dump({**whole, **job}))
        self.names.append(self.run("submit", "job.yaml").strip())
        return self.names[-1]


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path)
    yield user
    place = ["--namespace", NAMESPACE] if NAMESPACE else []
    for name in user.names:
        subprocess.run(["kubectl", "delete", "job", name, "--ignore-not-found", *place], check=False)


@pytest.mark.slow
def test_a_pipeline_over_two_pods(user: User) -> None:
    name = user.submit(SCRIPT.read_text(), distribution=PIPELINE, hyperparameters={"steps": 3})
    user.run("status", name, "--watch")
    assert "step 3 on pod-1" in user.run("logs", name, "--rank", "1")


@pytest.mark.slow
def test_the_first_failing_rank_is_named(user: User) -> None:
    name = user.submit(FAILS)
    user.run("status", name, "--watch", code=1)
    failure = json.loads(user.run("status", name, "--json"))["failure"]
    assert (failure["headline"], failure["rank"], failure["host"]) == ("ValueError: bad batch", 1, "pod-1")
    assert {line.split()[0] for line in user.run("logs", name).splitlines()} == {"pod-0", "pod-1"}


@pytest.mark.slow
def test_stop_ends_the_job(user: User) -> None:
    name = user.submit("import time; time.sleep(600)")
    user.run("stop", name, "--wait")
    assert json.loads(user.run("status", name, "--json"))["status"] == "Stopped"
