"""Train a small GPT on real text with the SMP v1 API: `smpkit run examples/gpt_text/job.yaml`, or `job_3d.yaml`."""

import argparse
import math
import os
import signal
from pathlib import Path

import torch
from data import Batches, standard_library
from model import GPT, Shape
from sample import write
from torch.nn import functional

import smpkit.torch as smp


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--save-every", type=int, default=60)
    parser.add_argument("--stop-at", type=int, help="at this step, ask for a stop as a spot reclaim does")
    parser.add_argument("--write-bytes", type=int, default=80, help="how much the trained model writes at the end")
    parser.add_argument("--recompute", default="each", help="checkpoint the blocks: each, contiguous, group_N, none")
    parser.add_argument("--checkpoints", type=Path, default=os.environ.get("SMPKIT_CHECKPOINT_DIR", "runs/checkpoints"))
    return parser.parse_known_args()[0]  # a launcher may add arguments of its own


def planned() -> tuple[GPT, dict[str, torch.Tensor]]:
    """What `smpkit plan --model train:planned` looks at: the model, and the arguments for a microbatch of two."""
    return GPT(Shape()), {"tokens": torch.zeros(2, Shape().context, dtype=torch.long)}


@smp.step
def train_step(model: smp.DistributedModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


@smp.step
def held_out_loss(model: smp.DistributedModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def evaluate(model: smp.DistributedModel, batches: Batches, count: int = 4) -> float:
    """Return the mean loss on text the model never trained on, in nats per byte, over all ranks."""
    model.eval()
    with torch.no_grad():
        losses = [held_out_loss(model, *batches.at(step)).reduce_mean().item() for step in range(count)]
    model.train()
    return float(torch.tensor(smp.allgather(losses, smp.DP_GROUP)).mean())


def learning_rate(step: int, steps: int) -> float:
    """Rise over the first steps, then fall along a cosine to a tenth."""
    warmup = min(1.0, (step + 1) / 20)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def num_parameters(shape: Shape) -> int:
    with torch.device("meta"):  # takes no memory, and draws no random numbers
        return sum(weight.numel() for weight in GPT(shape).parameters())


def say(text: str) -> None:
    if smp.rank() == 0:
        print(text, flush=True)


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    smp.stop_requested()  # from here on SIGTERM (a spot reclaim, say) ends the loop below, not the process
    torch.manual_seed(0)

    shape, text = Shape(), standard_library(arguments.text_bytes)
    held_out = len(text) // 20
    train = Batches(text[:-held_out], arguments.batch, shape.context, seed=smp.dp_rank())
    test = Batches(text[-held_out:], arguments.batch, shape.context, seed=1000 + smp.dp_rank())

    with smp.model_creation(tensor_parallelism=True):  # at degree 1 nothing is replaced
        gpt = GPT(shape)
    model = smp.DistributedModel(gpt)
    if arguments.recompute != "none":
        smp.set_activation_checkpointing(gpt.blocks, strategy=arguments.recompute)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, arguments.steps))

    step = 0
    if smp.latest_checkpoint(arguments.checkpoints):
        content = smp.resume_from_checkpoint(arguments.checkpoints)
        step = content["step"]
        scheduler.load_state_dict(content["scheduler"])

    def save() -> None:
        content = {"step": step, "scheduler": scheduler.state_dict()}
        smp.save_checkpoint(arguments.checkpoints, f"step_{step}", user_content=content, num_kept_partial_checkpoints=2)

    before, started = evaluate(model, test), step
    say(f"{num_parameters(shape):,} parameters, {len(text):,} bytes of text")
    say(f"held-out loss {before:.2f} at step {step}")
    bar = smp.progress(range(step + 1, arguments.steps + 1), initial=step, total=arguments.steps)
    for step in bar:
        optimizer.zero_grad()
        loss = train_step(model, *train.at(step - 1)).reduce_mean()
        optimizer.step()
        scheduler.step()
        bar.set_postfix(loss=loss.item(), refresh=False)
        smp.log({"loss": loss, "learning rate": scheduler.get_last_lr()[0]}, step, mean_over=smp.DP_GROUP)
        if step == arguments.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        stops = smp.stop_requested()
        if stops or step == arguments.steps or step % arguments.save_every == 0:
            save()
        if stops:
            break

    say(f"held-out loss {before:.2f} -> {evaluate(model, test):.2f} nats per byte in {step - started} steps")
    if smp.state.cfg.offload_activations:
        say(f"offloaded by {str(smp.offload_report()).splitlines()[0]}")
    if smp.stop_requested():
        return
    written = write(model, "    def ", arguments.write_bytes, shape.context)
    say("the model writes:\n" + "\n".join(f"  | {line}" for line in written.splitlines()))
    weights = model.state_dict(gather_to_rank0=True)
    folder = os.environ.get("SM_MODEL_DIR")
    if folder and smp.rank() == 0:
        torch.save(weights, Path(folder) / "model.pt")


if __name__ == "__main__":
    main()
