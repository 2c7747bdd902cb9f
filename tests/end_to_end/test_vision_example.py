"""The example with pictures: over pipeline × data it learns what plain PyTorch learns, BatchNorm included."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import ResNetForImageClassification

from tests.end_to_end.example_job import EXAMPLES, changed_as_much, launched, on_forked_ranks

JOB = EXAMPLES / "vision" / "job.yaml"


def told(said: str) -> list[tuple[float, float, float]]:
    found = re.findall(r"epoch \d  loss ([\d.]+) -> ([\d.]+)  accuracy ([\d.]+)%", said)
    return [(float(first), float(last), float(right)) for first, last, right in found]


def test_it_learns_what_plain_pytorch_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = on_forked_ranks(JOB, {"pictures": 96, "batch": 16, "epochs": 1, "output": tmp_path / "model"})
    ((first, last, _),) = told(said)
    assert (first, last) != (0, 0)
    learned = ResNetForImageClassification.from_pretrained(tmp_path / "model").state_dict()

    monkeypatch.syspath_prepend(JOB.parent)
    script = runpy.run_path(str(JOB.with_name("train.py")))
    torch.manual_seed(0)
    model = script["make_model"]("batch", 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    means, plain = trained(model, script["Shapes"](96, seed=1), batch=16, replicas=2, microbatches=2)
    assert (first, last) == pytest.approx((means[0], means[-1]), abs=2e-3)
    weights, averages = dict(model.named_parameters()), [name for name in plain if "running" in name]
    for names in (weights, averages):
        assert changed_as_much(*[[tensors[name] for name in names] for tensors in (learned, plain, before)])
    assert {int(learned[name]) for name in plain if name.endswith("num_batches_tracked")} == {3 * 2}


def trained(
    model: nn.Module, pictures: Dataset[tuple[Tensor, int]], *, batch: int, replicas: int, microbatches: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train one epoch in one process; return the first replica's losses, and weights with its averages of BatchNorm."""
    shares: list[DistributedSampler[Any]] = [
        DistributedSampler(pictures, replicas, rank, drop_last=True) for rank in range(replicas)
    ]
    loaders = [iter(DataLoader(pictures, batch, sampler=share, drop_last=True)) for share in shares]
    optimizer, means = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for batches in zip(*loaders, strict=True):
        optimizer.zero_grad()
        for replica, (seen, kinds) in enumerate(batches):
            own = {name: buffer.clone() for name, buffer in model.named_buffers()}
            losses = [
                model(pixel_values=part, labels=labels).loss
                for part, labels in zip(seen.chunk(microbatches), kinds.chunk(microbatches), strict=True)
            ]
            mean = torch.stack(losses).mean()
            (mean / replicas).backward()
            if replica == 0:
                means.append(mean.item())
            else:  # that replica has averages of its own
                model.load_state_dict(own, strict=False)
        optimizer.step()
    return means, model.state_dict()


@pytest.mark.slow
def test_the_job_with_groupnorm(tmp_path: Path) -> None:
    output = launched(JOB, {"norm": "group", "epochs": 2}, "--set", f"output={tmp_path}")
    epochs = told(output)
    assert epochs[-1][1] < epochs[0][0] - 0.3
    assert epochs[-1][2] > 50
