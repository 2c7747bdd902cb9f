"""Torch's offload policies under Hugging Face's Trainer and PEFT, which hand `context_fn` on to torch's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import smpkit
from tests.torch.recompute.test_policies import MUST, PRODUCT, SAVE, Operators, contexts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")]
BATCH, LENGTH = 2, 16


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, use_cache=False
    )
    return LlamaForCausalLM(config)


def tokens(seed: int) -> Tensor:
    return torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def by_trainer(wanted: Any, folder: Path) -> tuple[list[Tensor], int, int]:
    model = llama()
    offload = smpkit.offload_activations(model) if wanted is MUST else None
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=BATCH,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts(wanted)},
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": tokens(seed), "labels": tokens(seed)} for seed in range(6)]
    with Operators() as operators:
        Trainer(model, arguments, train_dataset=rows).train()
    moved = 0 if offload is None else offload.report().bytes_out
    return [weight.detach() for weight in model.parameters()], operators.runs[PRODUCT], moved


def by_peft(wanted: Any, _folder: Path) -> tuple[list[Tensor], int, int]:
    model: Any = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts(wanted)})
    model.train()
    offload = smpkit.offload_activations(model) if wanted is MUST else None
    with Operators() as operators:
        for seed in range(2):
            ids = torch.stack([tokens(seed), tokens(seed + 9)])
            model(input_ids=ids, labels=ids).loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return gradients, operators.runs[PRODUCT], 0 if offload is None else offload.report().bytes_out


@pytest.mark.parametrize("train", [by_trainer, by_peft])
def test_what_a_policy_offloads_is_as_what_it_saves(train: Any, tmp_path: Path) -> None:
    saved, expected, _ = train(SAVE, tmp_path)
    offloaded, runs, moved = train(MUST, tmp_path)
    assert len(saved) > 0
    assert all(torch.equal(one, other) for one, other in zip(saved, offloaded, strict=True))
    assert runs == expected
    assert moved > 0
