"""Time of one AdamW step on the CPU: torch's fused one as an OffloadOptimizer runs it, beside DeepSpeed's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.offload_model import deepspeed_adam
from smpkit.torch.distributed.host_memory import zeros

OPTIONS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
BASE = "torch fused AdamW, fp32 only"
OURS = "torch fused AdamW, bf16 weights out (OffloadOptimizer)"
TURNS, FEWEST_TURNS = 30, 5


def measure(num_parameters: int, num_threads: int, seconds: float, *, deepspeed: bool) -> tuple[dict[str, float], int]:
    """Return, by contestant, the least seconds of a step, and the number of steps of each.

    They take turns on the same weights and gradients, thirty times, or until the time is up.

    Args:
        num_parameters: how many numbers a step goes through.
        num_threads: that work on it.
        seconds: for all turns; there are five at least.
        deepspeed: whether its step is there.
    """
    torch.set_num_threads(num_threads)
    contestants = make_contestants(num_parameters, deepspeed=deepspeed)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        step()  # touches all memory
    until = time.perf_counter() + seconds
    for number in range(TURNS):
        if number >= FEWEST_TURNS and time.perf_counter() > until:
            break
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}, len(found[BASE])


def make_contestants(num_parameters: int, *, deepspeed: bool) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    gradient, master, first, second = memory = [zeros(num_parameters) for _ in range(4)]
    weight = zeros(num_parameters, torch.bfloat16)
    for each in (gradient, master):
        each.normal_()
    of_torch = [each.clone() for each in memory]

    def fused(gradient: Tensor, master: Tensor, first: Tensor, second: Tensor) -> None:
        steps = [torch.tensor(2.0)]
        options = OPTIONS | {"amsgrad": False, "maximize": False}
        torch._fused_adamw_([master], [gradient], [first], [second], [], steps, **options)

    def ours() -> None:
        fused(*memory)
        weight.copy_(master)

    contestants: dict[str, Callable[[], object]] = {
        BASE: lambda: fused(*memory),
        OURS: ours,
        "torch fused AdamW, fp32 only, in memory of torch": lambda: fused(*of_torch),
    }
    if deepspeed:
        theirs = deepspeed_adam.step_of(master, gradient, first, second)
        contestants["DeepSpeedCPUAdam, bf16 weights out"] = lambda: (theirs(), weight.copy_(master))
    return contestants
