"""Teach a T5 to translate pairs of a local file, over a pipeline: `smpkit run examples/translate/job.yaml`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from pairs import END, PAD, VOCABULARY, Pairs, read
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import T5Config, T5ForConditionalGeneration

import smpkit.torch as smp


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=Path, default=os.environ.get("SM_CHANNEL_PAIRS", "runs/pairs"), help="a folder")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=32, help="pairs per replica and step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, default=os.environ.get("SM_MODEL_DIR", "runs/output"))
    return parser.parse_known_args()[0]  # a launcher may add arguments of its own


def make_model(width: int = 128, layers: int = 2) -> T5ForConditionalGeneration:
    """Return a small T5 with random weights, over bytes as ByT5's."""
    config = T5Config(  # type: ignore[call-arg]  # two fields are of every model
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=END,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def planned() -> tuple[T5ForConditionalGeneration, dict[str, Tensor]]:
    """What `smpkit plan --model train:planned` looks at: the model, and the arguments for a microbatch."""
    source, target = torch.ones(8, 20, dtype=torch.long), torch.ones(8, 11, dtype=torch.long)
    return make_model(), {"input_ids": source, "attention_mask": source, "labels": target}


@smp.step
def train_step(model: smp.DistributedModel, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    loss = model(input_ids=source, attention_mask=mask, labels=target).loss
    model.backward(loss)
    return loss


@smp.step
def test_step(model: smp.DistributedModel, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    best = model(input_ids=source, attention_mask=mask, labels=target).logits.argmax(-1)
    return ((best == target) | (target == -100)).all(-1).float().mean()


def evaluate(model: smp.DistributedModel, test: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the share of targets of which each byte is the likeliest after those before it."""
    model.eval()
    with torch.no_grad():
        right = [test_step(model, *batch).reduce_mean().item() for batch in test]
    model.train()
    return sum(right) / len(right)


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    torch.manual_seed(0)
    pairs = [pair for file in sorted(arguments.pairs.glob("*.tsv")) for pair in read(file)]
    test = DataLoader(Pairs(pairs[:256]), 64, drop_last=True)
    data = Pairs(pairs[256:])
    sampler: DistributedSampler[Any] = DistributedSampler(data, smp.dp_size(), smp.dp_rank(), drop_last=True)
    train = DataLoader(data, arguments.batch, sampler=sampler, drop_last=True)

    model = smp.DistributedModel(make_model(arguments.width, arguments.layers))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.learning_rate, arguments.steps, pct_start=0.1)
    for step in range(arguments.steps):
        epoch, place = divmod(step, len(train))
        if place == 0:
            sampler.set_epoch(epoch)
            batches = iter(train)
        optimizer.zero_grad()
        loss = train_step(model, *next(batches)).reduce_mean()
        smp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if smp.rank() == 0 and (step + 1) % max(1, arguments.steps // 6) == 0:
            print(f"step {step + 1}  loss {loss.item():.3f}", flush=True)

    right = evaluate(model, test)
    if smp.rank() == 0:
        print(f"{right:.1%} of {len(test) * 64} unseen lines right", flush=True)
    smp.save_pretrained(arguments.output)  # all ranks call this


if __name__ == "__main__":
    main()
