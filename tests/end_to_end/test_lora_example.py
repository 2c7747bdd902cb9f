"""The LoRA example: only adapters learn, over a pipeline, and peft alone reads what was saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end.example_job import EXAMPLES, launched, on_forked_ranks, run_file

EXAMPLE = EXAMPLES / "lora"


def test_adapters_learn_over_a_pipeline_and_peft_reads_them(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    run_file(EXAMPLE / "make_base.py", str(base), "20")
    said = on_forked_ranks(EXAMPLE / "job.yaml", {"base": base, "output": adapter, "steps": 12})
    told = re.search(r"downwards ([\d.]+)% -> ([\d.]+)% of digits right; 17.3% of the weights were trained", said)
    assert told is not None, said
    assert float(told[2]) > float(told[1]) + 5

    learned = load_file(adapter / "adapter_model.safetensors")
    assert {name.split(".")[4] for name in learned} == {"0", "1", "2", "3"}, "of the layers of both ranks"
    assert all(weight.isfinite().all() and weight.any() for weight in learned.values())
    read = run_file(EXAMPLE / "use.py", str(base), str(adapter))
    assert float(re.findall(r"([\d.]+)%", read)[0]) == pytest.approx(float(told[2]), abs=0.2)


@pytest.mark.slow
def test_the_job_as_it_is_run(tmp_path: Path) -> None:
    run_file(EXAMPLE / "make_base.py", str(tmp_path / "base"), "2")
    places = ("--set", f"inputs.base={tmp_path / 'base'}", "--set", f"output={tmp_path / 'output'}")
    launched(EXAMPLE / "job.yaml", {"steps": 2}, *places)
    assert (tmp_path / "output" / "model" / "adapter_model.safetensors").is_file()
