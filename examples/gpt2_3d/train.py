"""Train Hugging Face's GPT-2 over pipeline, tensor and data parallelism: `smpkit run examples/gpt2_3d/job.yaml`."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
from memory import Held, table
from transformers import GPT2Config, GPT2LMHeadModel

import smpkit.torch as smp


def parse_arguments() -> argparse.Namespace:
    """Read the job's hyperparameters; a launcher may add arguments of its own, so unknown ones are let pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences per data-parallel rank and step")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    return parser.parse_known_args()[0]


def configuration(arguments: argparse.Namespace) -> GPT2Config:
    """Return a small GPT-2 over bytes."""
    return GPT2Config(
        vocab_size=256,
        n_positions=arguments.context,
        n_embd=arguments.width,
        n_layer=arguments.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def python_sources() -> torch.Tensor:
    """Return the standard library's own modules, byte by byte."""
    folder = Path(os.__file__).parent
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))))


def draw(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return `count` random pieces of the text."""
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)]


def planned() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """What `smpkit plan --model train:planned` looks at: the job's model, and the arguments for a microbatch."""
    with smp.model_creation(tensor_parallelism=True):
        gpt2 = GPT2LMHeadModel(configuration(parse_arguments()))
    return gpt2, {name: torch.zeros(2, 64, dtype=torch.long) for name in ("input_ids", "labels")}


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens)["loss"]
    model.backward(loss)
    return loss


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    torch.manual_seed(0)

    with smp.model_creation(tensor_parallelism=True):
        gpt2 = GPT2LMHeadModel(configuration(arguments))
    model = smp.DistributedModel(gpt2)
    transformer: Any = model.get_module().transformer
    layers = transformer.seq_layers if smp.tp_size() > 1 else transformer.h
    smp.set_activation_checkpointing(layers, strategy="each")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate))

    text = python_sources()
    generator = torch.Generator().manual_seed(smp.dp_rank())  # the ranks of a pipeline draw the same
    first = last = math.nan
    for step in range(arguments.steps):
        optimizer.zero_grad()
        tokens = draw(text, arguments.batch, arguments.context, generator)
        loss = train_step(model, tokens).reduce_mean().item()
        optimizer.step()
        last = sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size()
        first = last if step == 0 else first

    held = smp.allgather(Held.by_this_rank(model, optimizer))
    if smp.rank() == 0:
        print(f"loss {first:.3f} -> {last:.3f} in {arguments.steps} steps")
        print(table(held), flush=True)


if __name__ == "__main__":
    main()
