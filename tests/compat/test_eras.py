"""Scripts in the styles of 2021 to 2023 give over ranks what plain PyTorch gives, also from a checkpoint on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.commands import run_on_ranks, run_script
from tests.models_of_others import made_by_transformers

STEPS, SAVED = 4, 2

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 64, "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 0}
TEXT |= {"use_cache": False}
T5 = {**TEXT, "num_hidden_layers": 2, "d_kv": 8, "d_ff": 64, "feed_forward_proj": "gated-gelu"}
T5 |= {"decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "LMHeadModel", TEXT),
    "gptj": ("GPTJ", "ForCausalLM", {**TEXT, "rotary_dim": 4}),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", TEXT),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "vit": ("ViT", "ForImageClassification", {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 4}),
}


def start_from(folder: Path, model_type: str) -> nn.Module:
    """Make a model, leave its weights and configuration in a folder, and return it."""
    torch.manual_seed(0)
    model = made_by_transformers(*MODELS[model_type])
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / "fullmodel.pt")
    torch.save(model.config, folder / "config.pt")
    return model


def batch_of(model_type: str, step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    begin = torch.randint(0, 64, (STEPS * 8, 1), generator=torch.Generator().manual_seed(17))
    begin = begin[8 * step : 8 * step + 8]
    if model_type == "vit":
        return {
            "pixel_values": ((begin / 64)[..., None, None] * torch.ones(1, 3, 8, 8)).to(dtype),
            "labels": begin[:, 0] % 4,
        }
    tokens = (begin + torch.arange(12)) % 64
    labels = tokens[:, :5].contiguous() if model_type == "t5" else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def train_plainly(folder: Path, model_type: str, dtype: torch.dtype) -> dict[str, Any]:
    """Train in one process, and return what the script reports."""
    model = start_from(folder, model_type).to(dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

    def factor(step: int) -> float:
        return 1.0 if step < 1 else max(0.1, 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - 1) / 3))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(model_type, step, dtype)
        loss = model(**batch)["loss"]
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    square = sum(float(p.detach().double().norm()) ** 2 for p in model.parameters())
    with torch.no_grad():
        validation = model.eval()(**batch)["loss"].item()
    return {"losses": losses, "norms": norms, "validation": validation, "parameters": math.sqrt(square)}


def run(
    start: Path, folder: Path, model_type: str, settings: Mapping[str, Any], ranks: int, through_compat: bool = False
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    words: Sequence[str] = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    report = folder / "report.json"
    given = ("--model_type", model_type, "--start-from", str(start), "--report", str(report), *words)
    given += ("--checkpoint-dir", str(folder / "checkpoints"), "--model-dir", str(folder))
    if through_compat:
        run_script("model_families.py", *given, ranks=ranks, timeout=170)
    else:
        run_on_ranks("model_families.py", *given, ranks=ranks, parameters={})
    found: dict[str, Any] = json.loads(report.read_text())
    return found


PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2, "data_on_first_rank": 1, "activation_strategy": "group_2"}
SHARDED = {"sharded_data_parallel_degree": 2, "offload_activations": 1, "log_param_norms": 1, "delayed_param": 1}
TENSOR = {"tensor_parallel_degree": 2, "prescaled_batch": 1, "use_distributed_transformer": 1}
ALONE = {"microbatches": 2, "activation_checkpointing": 0}

Case = tuple[str, int, dict[str, Any]]
"""Model, ranks, and the script's arguments."""

FEW: list[tuple[Case, Case]] = [
    (("gpt_neox", 2, {**SHARDED, "skip_tracing": 1}), ("gpt_neox", 2, SHARDED)),
    (("t5", 2, {**PIPELINE, "shard_optimizer_state": 1}), ("t5", 1, ALONE)),
    (("vit", 4, {**PIPELINE, "offload_activations": 1}), ("vit", 4, {**PIPELINE, "offload_activations": 1})),
    (
        ("gptj", 4, {**TENSOR, "pipeline_parallel_degree": 2, "microbatches": 2, "delayed_param": 1}),
        ("gptj", 2, {**TENSOR, "shard_optimizer_state": 1}),
    ),
]
"""How each job trains and saves, and how it is resumed."""

MORE: list[tuple[Case, Case]] = [
    (("gpt2", 1, {**ALONE, "use_distributed_transformer": 1}), ("gpt2", 4, {**TENSOR, **PIPELINE})),
    (("gpt2", 8, {**TENSOR, **PIPELINE, "shard_optimizer_state": 1}), ("gpt2", 8, {**TENSOR, **PIPELINE})),
    (("gpt_neox", 8, {**SHARDED, **TENSOR}), ("gpt_neox", 8, {**SHARDED, **TENSOR})),
    (("gpt_neox", 4, {**TENSOR, "delayed_param": 1, "shard_optimizer_state": 1}), ("gpt_neox", 2, TENSOR)),
    (("gpt_neox", 8, {**SHARDED, "sharded_data_parallel_degree": 4}), ("gpt_neox", 4, SHARDED)),
    (("t5", 4, {**SHARDED, "skip_tracing": 1}), ("t5", 2, {**SHARDED, "microbatches": 2})),
    (("t5", 8, {**PIPELINE, "pipeline_parallel_degree": 4, "delayed_param": 1}), ("t5", 4, PIPELINE)),
    (("vit", 2, SHARDED), ("vit", 4, SHARDED)),
    (("vit", 2, {"shard_optimizer_state": 1, "microbatches": 2}), ("vit", 1, ALONE)),
    (("gptj", 4, PIPELINE), ("gptj", 2, PIPELINE)),
]


def train_and_resume(folder: Path, saved: Case, resumed: Case, **more: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the report of a job that saves, and of one that goes on from there."""
    reports = []
    for (model_type, ranks, settings), what in [(saved, {"save_at": SAVED}), (resumed, {"load_partial": 1})]:
        given = {**settings, **more, **what}
        reports.append(run(folder / "start", folder / "run", model_type, given, ranks))
    return reports[0], reports[1]


def compare(folder: Path, saved: Case, resumed: Case) -> None:
    """Compare a job in float64 with plain PyTorch: Hugging Face computes losses and some attention in float32."""
    plain = train_plainly(folder / "start", saved[0], torch.float64)
    whole, rest = train_and_resume(folder, saved, resumed, double=1)
    for name, value in plain.items():
        if name in whole and (name != "parameters" or "tensor_parallel_degree" not in saved[2]):
            assert whole[name] == pytest.approx(value, rel=1e-5), name
    for name in ("losses", "norms"):
        assert rest[name] == pytest.approx(whole[name][SAVED:], rel=0 if saved == resumed else 1e-5), name
    assert rest["validation"] == pytest.approx(whole["validation"], rel=1e-5)
    if "sharded_data_parallel_degree" in saved[2]:
        assert "parameters" in whole


@pytest.mark.parametrize(("saved", "resumed"), FEW, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_family_gives_what_plain_pytorch_gives(saved: Case, resumed: Case, tmp_path: Path) -> None:
    compare(tmp_path, saved, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), MORE, ids=lambda case: f"{case[0]}-{case[1]}")
def test_more_families_give_what_plain_pytorch_gives(saved: Case, resumed: Case, tmp_path: Path) -> None:
    compare(tmp_path, saved, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize(("saved", "resumed"), [*FEW, *MORE[:6]], ids=lambda case: f"{case[0]}-{case[1]}")
def test_families_in_half_precision(saved: Case, resumed: Case, half: str, tmp_path: Path) -> None:
    plain = train_plainly(tmp_path / "start", saved[0], torch.float32)
    whole, rest = train_and_resume(tmp_path, saved, resumed, **{half: 1})
    assert whole["losses"] == pytest.approx(plain["losses"], rel=0.03)
    same = saved == resumed
    assert rest["losses"] == pytest.approx(whole["losses"][SAVED:], rel=0 if same else 0.03)


@pytest.mark.slow
def test_a_family_through_compat(tmp_path: Path) -> None:
    model_type, ranks, settings = FEW[3][0]
    plain = train_plainly(tmp_path / "start", model_type, torch.float64)
    given = {**settings, "double": 1}
    report = run(tmp_path / "start", tmp_path / "run", model_type, given, ranks, through_compat=True)
    assert report["losses"] == pytest.approx(plain["losses"], rel=1e-5)
