"""The example of a Slurm job: what is sent is what the README shows, and a cluster runs it and goes on from a stop."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import process
from tests.end_to_end.example_job import EXAMPLES, on_forked_ranks
from tests.slurm.conftest import User

EXAMPLE = EXAMPLES / "slurm"


def test_what_is_sent_is_what_the_readme_shows() -> None:
    said = process("submit", str(EXAMPLE / "job.yaml"), "--dry-run", "--name", "mine").stdout
    shown = re.findall(r"^#SBATCH .*$", (EXAMPLE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(shown) >= 5
    assert [line for line in shown if line not in said] == []


def test_the_script_saves_and_goes_on(tmp_path: Path) -> None:
    small = {"steps": 3, "width": 32, "context": 16, "checkpoints": tmp_path}
    assert "from step 0\ndone at step 3 of 3" in on_forked_ranks(EXAMPLE / "job.yaml", small)
    assert "from step 3\ndone at step 4 of 4" in on_forked_ranks(EXAMPLE / "job.yaml", {**small, "steps": 4})


@pytest.mark.slow
def test_a_cluster_runs_it_and_it_goes_on_after_a_stop(user: User) -> None:
    for name in ("job.yaml", "train.py"):
        shutil.copy(EXAMPLE / name, user.folder)
    here = ["--set", "backend.slurm.partition=low", "--set", "distribution.torch_distributed.processes_per_host=1"]
    here += ["--set", "backend.slurm.cpus_per_node=1", "--set", "backend.slurm.grace_seconds=20"]
    name = user.run("submit", "job.yaml", *here, "--set", "hyperparameters.steps=100000").stdout.strip()
    user.until_logged(name, "step 50 ")
    user.run("stop", name, "--wait", code=None)
    stopped = re.findall(r"done at step (\d+) of 100000", user.log(name))
    assert len(stopped) == 1
    more = ["--set", f"hyperparameters.steps={int(stopped[0]) + 5}"]
    resumed = user.run("submit", "job.yaml", *here, *more).stdout.strip()
    user.run("status", resumed, "--watch")
    assert f"from step {stopped[0]}" in user.log(resumed)
