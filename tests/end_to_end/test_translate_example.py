"""The example with an encoder-decoder: over a pipeline it learns what plain PyTorch does; transformers reads it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import T5ForConditionalGeneration

from tests.end_to_end.example_job import EXAMPLES, changed_as_much, launched, on_forked_ranks, run_file

EXAMPLE = EXAMPLES / "translate"
SMALL = {"steps": 4, "batch": 16, "width": 64, "layers": 1, "learning-rate": 0.01}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    said = run_file(EXAMPLE / "make_dates.py", str(tmp_path / "pairs"), "400")
    assert re.search(r"400 pairs in .*, such as .* -> \d{4}-\d\d-\d\d$", said.strip())
    return tmp_path / "pairs"


def test_it_learns_what_plain_pytorch_learns(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_forked_ranks(EXAMPLE / "job.yaml", {**SMALL, "pairs": pairs, "output": tmp_path / "model"})
    assert re.search(r"step 4  loss [\d.]+\n[\d.]+% of 256 unseen lines right", said), said
    learned = T5ForConditionalGeneration.from_pretrained(tmp_path / "model")

    monkeypatch.syspath_prepend(EXAMPLE)
    script = runpy.run_path(str(EXAMPLE / "train.py"))
    torch.manual_seed(0)
    model = script["make_model"](64, 1)
    before = [weight.clone() for weight in model.state_dict().values()]
    lines = script["read"](pairs / "dates.tsv")
    data = script["Pairs"](lines[256:])
    batches = iter(DataLoader(data, 16, sampler=DistributedSampler(data, 1, 0, drop_last=True), drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 4, pct_start=0.1)
    for _ in range(4):
        source, mask, target = next(batches)
        optimizer.zero_grad()
        # The mean of the microbatches' means: targets of one length have as many bytes each.
        model(input_ids=source, attention_mask=mask, labels=target).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    assert changed_as_much(learned.state_dict().values(), model.state_dict().values(), before)

    line = run_file(EXAMPLE / "use.py", str(tmp_path / "model"), "3 May 1998", "14.07.1989")
    assert re.fullmatch(r"3 May 1998 -> .*\n14.07.1989 -> .*\n", line)


@pytest.mark.slow
def test_the_job_as_it_is_run(pairs: Path, tmp_path: Path) -> None:
    places = ("--set", f"inputs.pairs={pairs}", "--set", f"output={tmp_path / 'output'}")
    assert "unseen lines right" in launched(EXAMPLE / "job.yaml", {"steps": 3}, *places)
    assert (tmp_path / "output" / "model" / "model.safetensors").is_file()
