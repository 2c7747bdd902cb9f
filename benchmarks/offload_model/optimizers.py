"""Time of one AdamW step on the CPU: torch's fused one as an OffloadOptimizer runs it, beside DeepSpeed's."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import _get_build_directory

from benchmarks.common import table, take_turns
from smpkit.torch.distributed.host_memory import zeros

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
FUSED: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}
BASE = "torch fused AdamW, fp32 only"
TURNS = 30

Step = Callable[[], object]


def steps(options: argparse.Namespace) -> tuple[str, object]:
    """Measure with one thread and with two."""
    num_parameters = 1 << 20 if options.quick else 32 << 20
    missing = why_no_deepspeed()
    least = []
    for count in (1, 2):
        torch.set_num_threads(count)
        updates = contestants(num_parameters, deepspeed=missing is None)
        times = take_turns({name: partial(seconds_of, update) for name, update in updates.items()}, TURNS)
        least.append({name: min(runs) for name, runs in times.items()})
    rows = []
    for name in least[0]:
        cells = [(f"{best[name] / num_parameters * 1e9:.2f}", f"{best[name] / best[BASE]:.2f}") for best in least]
        rows.append([name, *cells[0], *cells[1]])
    text = f"AdamW on {num_parameters / 1e6:.1f} million parameters, the least of {TURNS} steps.\n\n"
    text += table(["", "ns per parameter, 1 thread", "/ torch", "2 threads", "/ torch"], rows)
    return text if missing is None else f"{text}\n\nDeepSpeedCPUAdam is left out: {missing}.", least


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def contestants(num_parameters: int, *, deepspeed: bool) -> dict[str, Step]:
    """Return steps on the same weights and gradients; but for one, all memory is smpkit's large pages."""
    torch.manual_seed(0)
    gradient, master, first, second = memory = [zeros(num_parameters) for _ in range(4)]
    weight = zeros(num_parameters, torch.bfloat16)
    for tensor in (gradient, master):
        tensor.normal_()
    of_torch = [tensor.clone() for tensor in memory]

    def fused(gradient: Tensor, master: Tensor, first: Tensor, second: Tensor) -> None:
        torch._fused_adamw_([master], [gradient], [first], [second], [], [torch.tensor(2.0)], **OPTIONS, **FUSED)

    def ours() -> None:
        fused(*memory)
        weight.copy_(master)

    steps: dict[str, Step] = {
        BASE: lambda: fused(*memory),
        "torch fused AdamW, bf16 weights out (OffloadOptimizer)": ours,
        "torch fused AdamW, fp32 only, in memory of torch": lambda: fused(*of_torch),
    }
    if deepspeed:
        theirs = deepspeed_step(master, gradient, first, second)
        steps["DeepSpeedCPUAdam, bf16 weights out"] = lambda: (theirs(), weight.copy_(master))
    return steps


def why_no_deepspeed() -> str | None:
    """Return why DeepSpeed's step cannot be used, or None. Compiling takes minutes, so that is not begun here."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    library = Path(_get_build_directory("cpu_adam", verbose=False), "cpu_adam.so")
    return None if library.exists() else f"it is not compiled: there is no {library}"


def deepspeed_step(master: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> Step:
    """Return a step on this memory, the states' too."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient
    optimizer = DeepSpeedCPUAdam([parameter], **OPTIONS)
    step: Step = optimizer.step
    step()  # makes states of its own, in memory of torch
    optimizer.state[parameter].update(exp_avg=first, exp_avg_sq=second)
    return step
