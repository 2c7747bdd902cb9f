"""Train a small GPT on real text with the SMP v1 API; run it with `smpkit run examples/gpt_text/job.yaml`."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from data import Batches, standard_library
from model import GPT, Shape
from progress import Progress
from torch.nn import functional

import smpkit.torch as smp


def parse_arguments() -> argparse.Namespace:
    """Read the job's hyperparameters; a launcher may add arguments of its own, so unknown ones are let pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--save-every", type=int, default=80)
    parser.add_argument("--write-bytes", type=int, default=160, help="how much the trained model writes at the end")
    parser.add_argument("--recompute", default="none", help="checkpoint the blocks: each, contiguous or group_N")
    parser.add_argument("--checkpoints", type=Path, default=os.environ.get("SMPKIT_CHECKPOINT_DIR", "runs/checkpoints"))
    return parser.parse_known_args()[0]


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


@smp.step
def test_step(model: smp.DistributedModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@smp.step
def score_step(model: smp.DistributedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens)[:, -1]


def write(model: smp.DistributedModel, prompt: str, length: int, context: int, temperature: float = 0.7) -> str:
    """Continue `prompt` by `length` bytes, once per microbatch; every rank takes part, and all write the same."""
    generator = torch.Generator(smp.state.device).manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())] * smp.state.cfg.microbatches, device=smp.state.device)
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            scores = score_step(model, tokens[:, -context:]).concat() / temperature
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1, generator=generator)], dim=1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")


def evaluate(model: smp.DistributedModel, batches: Batches, count: int = 4) -> float:
    """Return the mean loss on text the model never trained on, in nats per byte, over all ranks."""
    model.eval()
    with torch.no_grad():
        losses = [test_step(model, *batches.at(step)).reduce_mean().item() for step in range(count)]
    model.train()
    everyone = [loss for losses in smp.allgather(losses, smp.DP_GROUP) for loss in losses]
    return sum(everyone) / len(everyone)


def learning_rate(step: int, steps: int) -> float:
    """Rise over the first steps, then fall along a cosine to a tenth."""
    warmup = min(1.0, (step + 1) / 20)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    smp.stop_requested()  # from here on SIGTERM (a spot reclaim, say) ends the loop below, not the process
    torch.manual_seed(0)

    shape = Shape()
    text = standard_library(arguments.text_bytes)
    held_out = len(text) // 20
    train = Batches(text[:-held_out], arguments.batch, shape.context, seed=smp.dp_rank())
    test = Batches(text[-held_out:], arguments.batch, shape.context, seed=1000 + smp.dp_rank())

    gpt = GPT(shape)
    model = smp.DistributedModel(gpt)
    if arguments.recompute != "none":
        smp.set_activation_checkpointing(gpt.blocks, strategy=arguments.recompute)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, arguments.steps))

    step = 0
    if smp.latest_checkpoint(arguments.checkpoints):
        content = smp.resume_from_checkpoint(arguments.checkpoints)
        step = int(content["step"])
        scheduler.load_state_dict(content["scheduler"])

    def save() -> None:
        content = {"step": step, "scheduler": scheduler.state_dict()}
        smp.save_checkpoint(arguments.checkpoints, f"step_{step}", user_content=content, num_kept_partial_checkpoints=2)

    first = evaluate(model, test)
    progress = Progress(smp.rank() == 0, arguments.steps, start=step)
    progress.say(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text, {smp.size()} ranks, "
        f"{smp.state.cfg.microbatches} microbatches; held-out loss {first:.2f} at step {step}"
    )
    began = time.perf_counter()
    started_at = step
    while step < arguments.steps and not smp.stop_requested():
        optimizer.zero_grad()
        loss = train_step(model, *train.at(step)).reduce_mean()
        optimizer.step()
        scheduler.step()
        step += 1
        progress.update(step, f"loss {loss.item():.3f}")
        if step % arguments.save_every == 0:
            save()
    if step % arguments.save_every:
        save()
    seconds = time.perf_counter() - began

    last = evaluate(model, test)
    bytes_seen = (step - started_at) * arguments.batch * shape.context * smp.dp_size()
    progress.say(
        f"held-out loss {first:.2f} -> {last:.2f} nats per byte in {step - started_at} steps, "
        f"{bytes_seen / max(seconds, 1e-9):,.0f} bytes per second"
    )
    written = write(model, "    def ", arguments.write_bytes, shape.context)
    progress.say("the model writes:\n" + "\n".join(f"  | {line}" for line in written.splitlines()))
    weights = model.state_dict(gather_to_rank0=True)
    folder = os.environ.get("SM_MODEL_DIR")
    if folder and smp.rank() == 0:
        torch.save(weights, Path(folder) / "model.pt")


if __name__ == "__main__":
    main()
