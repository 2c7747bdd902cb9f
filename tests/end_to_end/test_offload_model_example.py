"""The example of OffloadModel learns within its device budget, and the plan says what it takes."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.example_job import EXAMPLES, launched, run_file

EXAMPLE = EXAMPLES / "offload_model"
SCRIPT = EXAMPLE / "train.py"


def test_the_example_learns_within_its_budget() -> None:
    said = run_file(SCRIPT, "--steps=21", "--width=64", "--layers=8", "--device-budget-mib=4.5")
    needed = re.search(r"weights and AdamW's state take ([\d.]+) MiB", said)
    device = re.search(r"device +planned +([\d.]+) MiB", said)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert needed is not None
    assert device is not None
    assert float(needed[1]) > 4.5 > float(device[1])
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_the_job_as_it_is_run() -> None:
    said = launched(EXAMPLE / "job.yaml", {})
    assert "12 slices" in said
    assert "step   39  loss " in said


def test_a_budget_for_less_than_a_layer_is_refused() -> None:
    with pytest.raises(AssertionError, match="even one layer at a time needs"):
        run_file(SCRIPT, "--device-budget-mib=0.1")
