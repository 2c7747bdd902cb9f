"""The example of all kinds of parallelism at once: it learns, and every rank holds its part only."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from smpkit.config.load import load_job
from smpkit_container.arguments import script_arguments
from tests.ranks import run_ranks

JOB = Path(__file__).parents[2] / "examples" / "gpt2_3d" / "job.yaml"
SMALL = {"steps": 6, "layers": 2, "width": 32, "context": 32, "learning-rate": 0.01}


def num_weights(width: int, layers: int, context: int) -> int:
    """Count GPT-2's: embeddings of bytes and positions, blocks with biases and two norms, the last norm."""
    block = 12 * width * width + 9 * width + 4 * width
    return (256 + context) * width + layers * block + 2 * width


def launched() -> str:
    """Run the job with `smpkit run`; return what rank 0 said."""
    small = [part for key, value in SMALL.items() for part in ("--set", f"hyperparameters.{key}={value}")]
    command = [sys.executable, "-m", "smpkit", "run", str(JOB), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("[rank 0] ", "")


def forked() -> str:
    """Run the job's script, with the job's parameters, on ranks that have torch and transformers already."""
    job = load_job(JOB).config
    parameters = job.distribution.model_parallel
    assert parameters is not None
    given = json.dumps(parameters.model_dump(mode="json", exclude_unset=True))
    arguments = script_arguments({**job.hyperparameters, **SMALL}, ())
    return str(run_ranks(_as_script, job.num_processes(job.distribution.processes_per_host or 1), arguments, given)[0])


def _as_script(arguments: Sequence[str], parameters: str) -> str:
    os.environ["SM_HP_MP_PARAMETERS"] = parameters
    os.environ["SM_FRAMEWORK_PARAMS"] = '{"sagemaker_mpi_enabled": true}'
    sys.argv = [str(JOB.with_name("train.py")), *arguments]
    sys.path.insert(0, str(JOB.parent))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return said.getvalue()


@pytest.mark.parametrize("run", [forked, pytest.param(launched, marks=pytest.mark.full)])
def test_the_example_learns_on_eight_ranks_that_hold_their_parts(run: Callable[[], str]) -> None:
    output = run()
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) in 6 steps", output).groups())  # type: ignore[union-attr]
    assert abs(first - 5.55) < 0.3  # ln 256: it knows nothing
    assert last < first - 0.3
    rows = re.findall(r"^ *\d +([01] [01] [01]) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", output, re.MULTILINE)
    assert sorted(row[0] for row in rows) == [f"{pp} {tp} {rdp}" for pp in (0, 1) for tp in (0, 1) for rdp in (0, 1)]
    whole = num_weights(32, 2, 32) * 4 / 1024
    for _, weights, gradients, optimizer, offloaded in rows:
        assert float(weights) < 0.45 * whole, "a quarter, and what is on several ranks: the tied embedding, norms"
        assert weights == gradients
        assert float(optimizer) >= 1.99 * float(weights)
        assert float(offloaded) > 0
