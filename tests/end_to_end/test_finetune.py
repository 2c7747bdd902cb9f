"""The fine-tuning example: it learns, resumes where it was, and exports what transformers or peft alone reads."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.example_job import EXAMPLES, launched, on_forked_ranks, run_file

EXAMPLE = EXAMPLES / "finetune"
HELD_OUT = re.compile(r"step (\d+)  (?:loss [\d.]+  )?held-out loss ([\d.]+)")


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    """Return hyperparameters for a folder of texts that is small, and folders of this test's."""
    (tmp_path / "text").mkdir()
    for name in ("train.py", "data.py"):
        text = (EXAMPLE / name).read_text(encoding="utf-8")
        (tmp_path / "text" / name).write_text(text * 3, encoding="utf-8")
    assert "1,049,728 random weights" in run_file(EXAMPLE / "make_model.py", str(tmp_path / "model"))
    folders = {name: str(tmp_path / name) for name in ("model", "text", "checkpoints", "output")}
    return {**folders, "batch": 4, "save-every": 4, "context": 64}


@pytest.mark.slow
def test_it_learns_resumes_and_transformers_reads_what_it_wrote(small: dict[str, Any]) -> None:
    told = HELD_OUT.findall(on_forked_ranks(EXAMPLE / "job.yaml", {**small, "steps": 5}))
    (first, before), (middle, _), (last, after) = [(int(step), float(loss)) for step, loss in told]
    assert (first, middle, last) == (0, 4, 5)
    assert before == pytest.approx(6.93, abs=0.15)  # ln 1024: it knows nothing
    assert after < before - 0.25

    output = on_forked_ranks(EXAMPLE / "job.yaml", {**small, "steps": 6})
    (first, resumed), (last, after) = [(int(step), float(loss)) for step, loss in HELD_OUT.findall(output)]
    assert (first, last) == (5, 6)
    assert resumed == float(told[-1][1])
    out, on_device = re.search(r"([\d.]+) \wiB out.* at most ([\d.]+) KiB on the device", output).groups()  # type: ignore[union-attr]
    assert float(out) > 0
    assert float(on_device) > 0

    said = run_file(EXAMPLE / "use.py", small["output"], "--text", small["text"], "--context", "64")
    loss = re.search(r"held-out loss ([\d.]+), weights in torch.bfloat16\ndef __init__\(self,", said)
    assert loss is not None, said
    assert float(loss[1]) == pytest.approx(after, abs=0.02)


@pytest.mark.slow
def test_adapters_alone_learn_and_peft_reads_those_of_both_stages(small: dict[str, Any]) -> None:
    told = on_forked_ranks(EXAMPLE / "lora.yaml", {**small, "steps": 3})
    (_, before), (_, after) = [(int(step), float(loss)) for step, loss in HELD_OUT.findall(told)]
    assert after < before
    assert "6.9% of the weights were trained" in told

    adapters = load_file(Path(small["output"]) / "adapter_model.safetensors")
    assert {name.split(".")[4] for name in adapters} == {"0", "1", "2", "3"}, "of the layers of both stages"
    assert all(weight.isfinite().all() and weight.any() for weight in adapters.values())
    folders = (small["output"], "--base", small["model"], "--text", small["text"], "--context", "64")
    read = re.search(r"held-out loss ([\d.]+)", run_file(EXAMPLE / "use.py", *folders))
    assert read is not None
    assert float(read[1]) == pytest.approx(after, abs=0.02)


@pytest.mark.slow
def test_the_job_as_it_is_run(small: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    sizes = {name: small[name] for name in ("text", "batch", "context", "save-every")}
    job = tmp_path / "example" / "job.yaml"
    launched(job, {**sizes, "steps": 2}, "--set", f"inputs.model={small['model']}")
    model = tmp_path / "example" / "runs" / "output" / "model"
    assert (model / "model.safetensors").is_file()
    assert (model / "tokenizer.json").is_file()
    [board] = job.parent.glob("runs/finetune-*/tensorboard")
    events = EventAccumulator(str(board))
    events.Reload()
    assert [value.step for value in events.Scalars("loss")] == [1, 2]
    assert [value.step for value in events.Scalars("held-out loss")] == [2]
