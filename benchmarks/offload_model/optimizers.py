"""Time of one AdamW step on the CPU: what one pass over memory costs beside the ways there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.offload_model import deepspeed_adam
from smpkit.torch.distributed.host_memory import zeros
from smpkit.torch.offload_model import kernels
from smpkit.torch.offload_model.kernels import Adam, FlatRange, Kernel, Workers, one_pass, tiled

OPTIONS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
BASE = "torch fused AdamW, fp32 only"
PEER = "DeepSpeedCPUAdam, fp32 only"
TURNS, FEWEST_TURNS = 30, 5
TOLD_SECONDS = 5.0


def measure(
    num_parameters: int, num_threads: int, seconds: float, *, deepspeed: bool, compiled: bool = True
) -> tuple[dict[str, float], int]:
    """Return, by contestant, the least seconds of a step, and the number of steps of each.

    They take turns on the same weights and gradients, thirty times, or until the time is up.

    Args:
        num_parameters: how many numbers a step goes through.
        num_threads: that work on it.
        seconds: for all turns; there are five at least.
        deepspeed: whether its step is there.
        compiled: whether torch.compile takes part, which takes a minute to compile.
    """
    torch.set_num_threads(num_threads)
    contestants = make_contestants(num_parameters, num_threads, deepspeed=deepspeed, compiles=compiled)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for name, step in contestants.items():
        start = time.perf_counter()
        step()  # compiles, and touches all memory
        if time.perf_counter() - start > TOLD_SECONDS:
            print(f"{name}: {time.perf_counter() - start:.0f} s to make ready", flush=True)
    until = time.perf_counter() + seconds
    for number in range(TURNS):
        if number >= FEWEST_TURNS and time.perf_counter() > until:
            break
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}, len(found[BASE])


def make_contestants(
    num_parameters: int, num_threads: int, *, deepspeed: bool, compiles: bool
) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    gradient, master, first, second, wide = (zeros(num_parameters) for _ in range(5))
    narrow, weight = (zeros(num_parameters, torch.bfloat16) for _ in range(2))
    for each in (gradient, master):
        each.normal_()
    narrow.copy_(gradient)
    rule = Adam(**OPTIONS, decoupled=True, step=2, factor=1.0)

    def fused(with_gradient: Tensor, memory: tuple[Tensor, ...] = (master, first, second)) -> None:
        torch._fused_adamw_(
            [memory[0]],
            [with_gradient],
            [memory[1]],
            [memory[2]],
            [],
            [torch.tensor(2.0)],
            **OPTIONS,
            amsgrad=False,
            maximize=False,
        )

    of_torch = [each.clone() for each in (gradient, master, first, second)]

    def three_passes() -> None:
        wide.copy_(narrow)
        fused(wide)
        weight.copy_(master)

    def two_passes() -> None:
        fused(gradient)
        weight.copy_(master)

    wide_span = FlatRange(gradient, master, (first, second), None)
    out_span = FlatRange(gradient, master, (first, second), weight)
    narrow_span = FlatRange(narrow, master, (first, second), weight)

    def ours(kernel: Kernel, span: FlatRange) -> Callable[[], object]:
        workers = Workers(num_threads)

        def step() -> None:
            with mock.patch.object(kernels, "one_pass", kernel):
                for update in workers.run([(rule, span)], lambda: None):
                    update.result()

        return step

    contestants: dict[str, Callable[[], object]] = {
        BASE: lambda: fused(gradient),
        "torch fused AdamW, fp32 only, in memory of torch": lambda: fused(of_torch[0], tuple(of_torch[1:])),
        "smpkit, fp32 only": ours(one_pass, wide_span),
        "smpkit, one pass with the cast out": ours(one_pass, out_span),
        "smpkit, one pass with both casts": ours(one_pass, narrow_span),
        "smpkit without a compiler, tiles with both casts": ours(tiled, narrow_span),
        "torch fused AdamW, cast": two_passes,
        "cast, torch fused AdamW, cast": three_passes,
    }
    if num_threads == 1 and compiles:  # it runs in the thread that calls it
        compiled = torch.compile(inductor_step, dynamic=True, fullgraph=True)
        constants = [torch.tensor(each) for each in rule.constants]
        contestants["torch.compile, one pass with both casts"] = lambda: compiled(
            narrow, master, first, second, weight, *constants
        )
    if deepspeed:
        theirs = deepspeed_adam.step_of(master, gradient, first, second)

        def two_passes_of_theirs() -> None:
            theirs()
            weight.copy_(master)

        def three_passes_of_theirs() -> None:
            gradient.copy_(narrow)
            two_passes_of_theirs()

        contestants[PEER] = theirs
        contestants["DeepSpeedCPUAdam, cast"] = two_passes_of_theirs
        contestants["cast, DeepSpeedCPUAdam, cast"] = three_passes_of_theirs
    return contestants


def inductor_step(
    gradient: Tensor, master: Tensor, first: Tensor, second: Tensor, weight: Tensor, *constants: Tensor
) -> None:
    """The same arithmetic for torch.compile."""
    beta1, beta2, eps, decay, l2, size, root, factor = constants
    wide = gradient.float() * factor + master * l2
    m = first * beta1 + wide * (1 - beta1)
    v = second * beta2 + wide * wide * (1 - beta2)
    p = master * decay - size * m / (v.sqrt() / root + eps)
    first.copy_(m)
    second.copy_(v)
    master.copy_(p)
    weight.copy_(p)
