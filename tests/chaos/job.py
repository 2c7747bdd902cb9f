"""The job that faults strike: a language model with dropout, AdamW, and a checkpoint every few steps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from tests.models import TOKENS, TiedFunctional, block

STEPS, SAVE_EVERY, TIMEOUT = 12, 3, 10
LENGTH, BATCH = 8, 4

traps: dict[str, Callable[[], object]] = {}
"""What a fault makes this rank do in `forward`, `backward` or before the `update` of the weights."""


def spring(place: str) -> None:
    traps.get(place, lambda: None)()


class Trap(torch.autograd.Function):
    """The identity, in which a fault can wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        spring("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        spring("backward")
        return gradient


class Layer(nn.Module):
    """A layer in which a fault can wait; tensor-parallel ranks divide a half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        smp.set_tensor_parallelism(self.inner.get_submodule("0"))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.inner(Trap.apply(x)), 0.1, self.training)


class Model(TiedFunctional):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])


@smp.step
def train_step(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    model.backward(loss)
    return loss


class Training:
    """A run of the job on this rank; it writes `step loss` to `losses-RANK`, the loss to the last bit."""

    def __init__(self, folder: Path, *, blocking: bool = True) -> None:
        torch.manual_seed(1)
        self.blocking = blocking
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.model = smp.DistributedModel(Model())
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.tokens = torch.empty(0)

    def run(self, fault: Callable[[Training], object] | None, at: int) -> None:
        """Train to the end; before step `at`, call `fault`."""
        start = 0
        if smp.latest_checkpoint(self.checkpoints) is not None:
            start = smp.resume_from_checkpoint(self.checkpoints)["step"]
        losses = self.folder / f"losses-{smp.rank()}"
        for step in range(start, STEPS):
            random = torch.Generator().manual_seed(100 * step + smp.dp_rank())
            self.tokens = torch.randint(TOKENS, (BATCH, LENGTH), generator=random)
            if fault is not None and step == at and fault(self) == "skip":
                continue
            self.optimizer.zero_grad()
            loss = train_step(self.model, self.tokens).reduce_mean()
            spring("update")
            self.optimizer.step()
            with losses.open("a") as file:
                file.write(f"{step} {loss.item().hex()}\n")
            if (step + 1) % SAVE_EVERY == 0:
                content = {"step": step + 1}
                smp.save_checkpoint(self.checkpoints, f"step_{step + 1}", user_content=content, blocking=self.blocking)


def wait_to_be_struck(training: Training) -> None:
    """Tell the runner who this rank is, and train on; but not to the end before it has struck."""
    file = training.folder / "victim"
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)

    steps = iter(range(STEPS))

    def wait() -> None:
        last = next(steps) == 1
        while last and not (training.folder / "struck").exists():
            time.sleep(0.01)
        if last:
            time.sleep(0.6 * TIMEOUT)  # the launchers notice before the job is over

    traps["update"] = wait


def run(folder: str, config: Mapping[str, Any] | None = None) -> None:
    """Run the job; what goes wrong is in `fault.json`."""
    from tests.chaos.faults import FAULTS

    smp.init(None if config is None else dict(config))
    file = Path(folder) / "fault.json"
    told = json.loads(file.read_text()) if file.exists() else {}
    fault = FAULTS.get(told.get("fault", ""))
    training = Training(Path(folder), blocking=fault is None or not fault.in_background)
    if fault is None or (smp.rank() != told["victim"] and not fault.everywhere):
        training.run(None, 0)
    else:
        training.run(fault.in_rank or wait_to_be_struck, told["at"])
