"""The example with pictures: it learns over pipeline × data, and transformers reads what was saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn
from transformers import ResNetForImageClassification

from tests.end_to_end.example_job import EXAMPLES, launched, on_forked_ranks

JOB = EXAMPLES / "vision" / "job.yaml"


def told(said: str) -> list[tuple[float, float, float]]:
    found = re.findall(r"epoch \d  loss ([\d.]+) -> ([\d.]+)  accuracy ([\d.]+)%", said)
    return [(float(first), float(last), float(right)) for first, last, right in found]


def test_it_learns_with_batchnorm_and_transformers_reads_it(tmp_path: Path) -> None:
    said = on_forked_ranks(JOB, {"pictures": 256, "batch": 16, "epochs": 1, "output": tmp_path / "model"})
    ((first, last, _),) = told(said)
    assert last < first - 0.25
    model = ResNetForImageClassification.from_pretrained(tmp_path / "model")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 9
    for norm in norms:  # of both stages
        assert norm.num_batches_tracked == 8 * 2, "eight steps of two microbatches"
        assert norm.running_mean is not None
        assert norm.running_mean.any()


@pytest.mark.full
def test_the_job_with_groupnorm(tmp_path: Path) -> None:
    output = launched(JOB, {"norm": "group", "epochs": 2}, "--set", f"output={tmp_path}")
    epochs = told(output)
    assert epochs[-1][1] < epochs[0][0] - 0.3
    assert epochs[-1][2] > 50
