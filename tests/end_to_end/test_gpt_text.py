"""The main job: the example learns, writes, saves, resumes, and saves when it is asked to stop."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_text"
SMALL = ["--set", "hyperparameters.text-bytes=200000", "--set", "hyperparameters.batch=4"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the job file of a copy of the example, so that its checkpoints stay out of the source tree."""
    folder = tmp_path / "gpt_text"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("checkpoints", "__pycache__"))
    return folder / "job.yaml"


def command(job: Path, steps: int) -> list[str]:
    return [sys.executable, "-m", "smpkit", "run", str(job), *SMALL, "--set", f"hyperparameters.steps={steps}"]


def run(job: Path, steps: int) -> str:
    done = subprocess.run(command(job, steps), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_learns_saves_and_resumes(job: Path) -> None:
    first = run(job, 20)
    before, after = re.search(r"held-out loss ([\d.]+) -> ([\d.]+) nats per byte in 20 steps", first).groups()  # type: ignore[union-attr]
    assert float(before) == pytest.approx(5.55, abs=0.3)  # ln 256: it knows nothing
    assert float(after) < float(before) - 1
    assert "[rank 0] the model writes:\n[rank 0]   |     def " in first
    assert (job.parent / "checkpoints" / "newest").read_text().strip() == "step_20_partial"
    second = run(job, 24)
    assert f"held-out loss {after} at step 20" in second
    assert "in 4 steps" in second


@pytest.mark.full
def test_recomputing_its_blocks_changes_nothing(job: Path) -> None:
    losses = []
    for recompute in ("none", "each"):
        shutil.rmtree(job.parent / "checkpoints", ignore_errors=True)
        done = subprocess.run(
            [*command(job, 4), "--set", f"hyperparameters.recompute={recompute}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        losses.append(re.findall(r"loss [\d.]+(?: -> [\d.]+)?", done.stdout))
    assert losses[0] == losses[1] != []


def test_asked_to_stop_it_saves_and_ends_well(job: Path) -> None:
    newest = job.parent / "checkpoints" / "newest"
    with subprocess.Popen(
        [*command(job, 100_000), "--set", "hyperparameters.save-every=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 100
        while not newest.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    steps = re.search(r"held-out loss .* in (\d+) steps", output)
    assert steps is not None
    assert newest.read_text().strip() == f"step_{steps[1]}_partial"
    # What was saved then goes on, on other degrees.
    degree = "distribution.smdistributed.modelparallel.parameters.pipeline_parallel_degree=2"
    resumed = subprocess.run(
        [*command(job, int(steps[1]) + 2), "--set", degree], capture_output=True, text=True, timeout=120, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"at step {steps[1]}" in resumed.stdout
    assert "in 2 steps" in resumed.stdout


def test_the_same_script_runs_over_a_pipeline(job: Path) -> None:
    degree = "distribution.smdistributed.modelparallel.parameters.pipeline_parallel_degree=2"
    done = subprocess.run(
        [*command(job, 10), "--set", degree], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pipeline 2 × tensor 1 × data 2" in done.stderr
    before, after = re.search(r"held-out loss ([\d.]+) -> ([\d.]+) nats per byte in 10 steps", done.stdout).groups()  # type: ignore[union-attr]
    assert float(after) < float(before) - 0.5
