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

from smpkit.observe.summary import read_summary
from tests.end_to_end.example_job import EXAMPLES

EXAMPLE = EXAMPLES / "gpt_text"
# At the rate of the example so few samples teach nothing after the first steps, depending on where the job is stopped.
SIZES = {"text-bytes": 200_000, "batch": 4, "write-bytes": 20, "learning-rate": 0.001}
SMALL = [part for name, value in SIZES.items() for part in ("--set", f"hyperparameters.{name}={value}")]

TWO = ("--set", "distribution.torch_distributed.processes_per_host=2")
# The life of the example is three jobs, each of which starts five processes or more.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the job file of a copy of the example, so that its checkpoints stay out of the source tree."""
    folder = tmp_path / "gpt_text"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    return folder / "job.yaml"


def command(job: Path, steps: int) -> list[str]:
    return [sys.executable, "-m", "smpkit", "run", str(job), *SMALL, "--set", f"hyperparameters.steps={steps}"]


def run(job: Path, steps: int, *more: str) -> tuple[str, str]:
    done = subprocess.run([*command(job, steps), *more], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def learned(output: str) -> tuple[float, float, int]:
    """Return the held-out loss before and after a run, and the number of its steps."""
    said = re.search(r"held-out loss ([\d.]+) -> ([\d.]+) nats per byte in (\d+) steps", output)
    assert said is not None, output
    return float(said[1]), float(said[2]), int(said[3])


@pytest.mark.slow
def test_the_example_learns_saves_when_asked_to_stop_and_resumes_on_any_degrees(job: Path) -> None:
    """One life: a pipeline learns and is asked to stop, goes on, and then four replicas do."""
    checkpoints = job.parent / "runs" / "checkpoints"
    with subprocess.Popen(
        [*command(job, 100_000), *TWO, "--set", "hyperparameters.save-every=20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 120
        while not (checkpoints / "newest").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    before, after, steps = learned(output)
    assert before == pytest.approx(5.55, abs=0.3)  # ln 256: it knows nothing
    assert after < before - 1
    assert steps >= 20
    assert "the model writes" not in output  # a job that is to stop is short of time
    assert (checkpoints / "newest").read_text().strip() == f"step_{steps}_partial"

    output, _ = run(job, steps + 2, *TWO)
    assert f"held-out loss {after:.2f} at step {steps}" in output
    _, after, more = learned(output)
    assert more == 2
    assert re.search(r"offloaded by rank 0: \d+ steps, ([\d.]+ \wiB) out, \1 back", output)
    assert "the model writes:\n" in output

    longer = "hyperparameters.write-bytes=92"  # than the context, so that the model is given slices in the end
    output, errors = run(job, steps + 22, "-p", "pipeline_parallel_degree=1", "--set", longer)
    assert "pipeline 1 × tensor 1 × data 4" in errors
    assert f"at step {steps + 2}" in output
    before, now, more = learned(output)
    assert before == pytest.approx(after, abs=0.1)
    assert now < before - 0.02
    assert more == 20
    assert f" {steps + 22}/{steps + 22} [" in output + errors, "the bar's last line"


@pytest.mark.slow
def test_three_dimensions_as_they_are_run(job: Path) -> None:
    """Every rank holds its part of the model, and the model learns."""
    output, _ = run(job.with_name("job_3d.yaml"), 3)
    before, after, steps = learned(output)
    assert steps == 3
    assert after < before
    assert "865,024 parameters" in output, "those of the whole model"
    [folder] = job.parent.glob("runs/gpt-text*/")
    ranks = read_summary(folder).ranks
    assert [each.rank for each in ranks] == [*range(8)]
    assert all(0 < each.peak.weights < 0.3 * 4 * 865_024 for each in ranks), "a quarter each, and what several hold"
