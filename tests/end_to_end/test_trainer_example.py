"""The example with `Trainer`: one script, within a memory, and over a pipeline with the losses of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.example_job import EXAMPLES, launched, on_forked_ranks, run_file

EXAMPLE = EXAMPLES / "trainer"
SMALL = {"steps": 8, "samples": 256}


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", said)]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.slow
def test_a_pipeline_has_the_losses_of_the_fitted_model_of_one_process(tmp_path: Path) -> None:
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    alone = run_file(
        EXAMPLE / "train.py", *small, "--batch=32", "--device-gib=0.0056", f"--output={tmp_path / 'alone'}"
    )
    assert re.search(r"^4 layers: \d", alone, re.MULTILINE), alone
    assert "BertForSequenceClassification: accuracy" in alone

    pipeline = on_forked_ranks(EXAMPLE / "job.yaml", {**SMALL, "output": tmp_path / "pipeline"})
    assert "DistributedModel: accuracy" in pipeline
    assert len(losses(alone)) == 4
    assert losses(pipeline) == pytest.approx(losses(alone), abs=2e-4)
    assert (tmp_path / "pipeline" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_job_learns(tmp_path: Path) -> None:
    output = launched(EXAMPLE / "job.yaml", {"steps": 90}, "--set", f"output={tmp_path}")
    assert losses(output)[-1] < losses(output)[0] - 0.3
    assert (tmp_path / "model" / "model.safetensors").is_file()
