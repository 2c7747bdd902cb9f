"""A few steps of a linear model, with the loss of each in `losses.txt`; saves when asked to stop, and resumes."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import smpkit.torch as smp


@smp.step
def train_step(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    return loss


def hold() -> None:
    """Wait for the stop, which comes when this machine gets to it; not for ever."""
    for _ in range(600):  # as often on all ranks
        if smp.stop_requested():
            return
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--fail-on-rank", type=int, default=-1)
    parser.add_argument("--hold-at", type=int, default=-1, help="in this step, wait until the job is asked to stop")
    arguments = parser.parse_args()
    smp.init()
    smp.stop_requested()
    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    folder = Path(os.environ["SMPKIT_CHECKPOINT_DIR"])
    losses: list[float] = []
    if smp.latest_checkpoint(folder):
        losses = smp.resume_from_checkpoint(folder)["losses"]
        print(f"resumed at step {len(losses)}", flush=True)
    while len(losses) < arguments.steps and not smp.stop_requested():
        if smp.rank() == arguments.fail_on_rank:
            raise ValueError("bad batch")
        generator = torch.Generator().manual_seed(1000 * len(losses) + smp.dp_rank())
        optimizer.zero_grad()
        loss = train_step(model, torch.randn(4, 8, generator=generator)).reduce_mean()
        optimizer.step()
        losses.append(sum(smp.allgather(loss.item(), smp.DP_GROUP)))
        smp.log({"loss": losses[-1]}, len(losses))
        print(f"step {len(losses)} on {os.environ['SM_CURRENT_HOST']}: {losses[-1]:.6f}", flush=True)
        time.sleep(arguments.seconds)
        if len(losses) == arguments.hold_at:
            hold()
    smp.save_checkpoint(folder, f"step_{len(losses)}", user_content={"losses": losses})
    if smp.stop_requested():
        print("saved and stopping", flush=True)
        return
    model_dir = Path(os.environ["SM_MODEL_DIR"])
    if smp.local_rank() == 0:
        (model_dir / "losses.txt").write_text("".join(f"{loss:.12f}\n" for loss in losses))
        (model_dir / "host.txt").write_text(os.environ["SM_CURRENT_HOST"])


if __name__ == "__main__":
    main()
