"""Scripts written in SMP v1's API, with its import, give over ranks what they give alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.commands import run_on_ranks


def _run(script: str, folder: Path, *arguments: str, ranks: int, parameters: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    given = ("--model-dir", str(folder), "--report", str(folder / "report.json"), *arguments)
    run_on_ranks(script, *given, ranks=ranks, parameters=parameters)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def _gpt2_alone(start: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the script's model with plain PyTorch; return losses and weights, and leave the first in `start`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    without = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=96, n_positions=12, n_embd=16, n_layer=4, n_head=4, use_cache=False, **without)  # type: ignore[arg-type]
    model = GPT2LMHeadModel(config).double()
    torch.save(model.state_dict(), start)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step))
    losses = []
    for step in range(steps):
        begin = torch.randint(0, 96, (8, 1), generator=torch.Generator().manual_seed(1000 + step))
        tokens = (begin + torch.arange(12)) % 96
        optimizer.zero_grad()
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_gpt2(tmp_path: Path) -> None:
    """Hugging Face's GPT-2 over pipeline 2 × tensor 2 trains as plain PyTorch does, from the same plain state dict."""
    losses, weights = _gpt2_alone(tmp_path / "fullmodel.pt", 4)
    degrees = ("--tensor_parallel_degree", "2", "--pipeline_parallel_degree", "2", "--microbatches", "2")
    start = ("--start-from", str(tmp_path / "fullmodel.pt"), "--prescaled_batch", "1")
    over_ranks = _run("gpt2.py", tmp_path / "4", *degrees, *start, ranks=4, parameters={})
    # Hugging Face computes the loss in float32, whatever the model's type.
    assert over_ranks["losses"] == pytest.approx(losses, rel=1e-6)
    saved = torch.load(tmp_path / "4" / "fullmodel.pt")
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-6, atol=1e-7)


def test_translation(tmp_path: Path) -> None:
    """Batches along the second dimension, and shards of a checkpoint; then in fp16."""
    job = {"microbatches": 2, "ddp": True}
    pipeline = {**job, "partitions": 2, "auto_partition": False, "default_partition": 0}
    alone = _run("translation.py", tmp_path / "1", ranks=1, parameters={"microbatches": 2})
    over_ranks = _run("translation.py", tmp_path / "4", ranks=4, parameters=pipeline)
    assert over_ranks["losses"] == pytest.approx(alone["losses"], rel=1e-10)
    assert over_ranks["right"] == alone["right"]
    half = _run("translation.py", tmp_path / "half", ranks=2, parameters={**pipeline, "fp16": True})
    assert half["losses"] == pytest.approx(alone["losses"], rel=0.05)
    assert half["scale"] == 2.0**13


def test_half_precision_of_the_script_itself(tmp_path: Path) -> None:
    """A script's own fp16, data on the first pipeline rank only, and objects in a checkpoint that is resumed from."""
    alone = _run("own_fp16.py", tmp_path / "1", ranks=1, parameters={})
    assert alone["losses"][-1] < alone["losses"][0]
    assert (alone["scale"], alone["history"]) == (2.0**9, 2)
    for ranks in (2, 4):
        folder = tmp_path / str(ranks)
        whole = _run("own_fp16.py", folder, "--save_at", "4", ranks=ranks, parameters={"partitions": 2})
        # Replicas add up halves of the batch in another order.
        assert whole["losses"] == pytest.approx(alone["losses"], rel=0 if ranks == 2 else 1e-3)
        again = tmp_path / f"{ranks} again"
        again.mkdir()
        for path in folder.glob("checkpoint.pt*"):
            path.rename(again / path.name)
        resumed = _run("own_fp16.py", again, "--resume", "1", ranks=ranks, parameters={"partitions": 2})
        assert resumed["losses"] == whole["losses"][4:]
        assert (resumed["scale"], resumed["history"]) == (whole["scale"], whole["history"]) == (2.0**9, 2)
