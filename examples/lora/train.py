"""Teach a frozen model another task with LoRA over a pipeline: `smpkit run examples/lora/job.yaml`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import peft
import torch
from numbers_task import accuracy, draw
from transformers import AutoModelForCausalLM

import smpkit.torch as smp


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, default=os.environ.get("SM_CHANNEL_BASE", "runs/base"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="samples per replica and step")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--output", type=Path, default=os.environ.get("SM_MODEL_DIR", "runs/adapter"))
    return parser.parse_known_args()[0]  # a launcher may add arguments of its own


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=tokens, labels=labels).loss
    model.backward(loss)
    return loss


@smp.step
def test_step(model: smp.DistributedModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return accuracy(model(input_ids=tokens).logits, labels)


def evaluate(model: smp.DistributedModel) -> float:
    """Return the share of digits that are right; all replicas test the same 256 samples."""
    model.eval()
    with torch.no_grad():
        right = test_step(model, *draw(256, torch.Generator().manual_seed(99), downwards=True)).reduce_mean().item()
    model.train()
    return float(right)


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    torch.manual_seed(0)

    base = AutoModelForCausalLM.from_pretrained(arguments.base)
    adapters = peft.LoraConfig(r=arguments.rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = smp.DistributedModel(peft.get_peft_model(base, adapters))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=arguments.learning_rate))
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=arguments.steps)

    before = evaluate(model)
    generator = torch.Generator().manual_seed(smp.dp_rank())  # the ranks of a pipeline draw the same
    for step in range(1, arguments.steps + 1):
        optimizer.zero_grad()
        loss = train_step(model, *draw(arguments.batch, generator, downwards=True)).reduce_mean()
        smp.clip_grad_norm_(model.parameters(), 1.0)  # by the norm of the adapters of all ranks
        optimizer.step()
        decay.step()
        if smp.rank() == 0 and step % 50 == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)
    after = evaluate(model)

    whole = model.state_dict(gather_to_rank0=True)  # all ranks call this
    if smp.rank() == 0:
        share = sum(weight.numel() for weight in trained) / sum(weight.numel() for weight in model.parameters())
        print(f"downwards {before:.1%} -> {after:.1%} of digits right; {share:.1%} of the weights were trained")
        adapted: Any = model.get_module()
        adapted.save_pretrained(arguments.output, state_dict=whole)
    smp.barrier()


if __name__ == "__main__":
    main()
