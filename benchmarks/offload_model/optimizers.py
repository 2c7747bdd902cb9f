"""Time of one AdamW step on the CPU: what one pass over memory costs beside the ways there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smpkit.torch.offload_model.kernels import Adam, Kernel, Span, one_pass, tiled
from smpkit.torch.offload_model.pages import zeros
from smpkit.torch.offload_model.workers import Workers

OPTIONS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
BASE = "torch fused AdamW, fp32 only"
PEER = "DeepSpeedCPUAdam, fp32 only"


def measure(num_parameters: int, num_threads: int, repetitions: int) -> dict[str, float]:
    """Return, by contestant, the least seconds of a step; they take turns on the same weights and gradients."""
    torch.set_num_threads(num_threads)
    contestants = make_contestants(num_parameters, num_threads)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        step()  # compiles, and touches all memory
    for _ in range(repetitions):
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}


def make_contestants(num_parameters: int, num_threads: int) -> dict[str, Callable[[], object]]:
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

    wide_span = Span(gradient, master, (first, second), None)
    out_span = Span(gradient, master, (first, second), weight)
    narrow_span = Span(narrow, master, (first, second), weight)

    def ours(kernel: Kernel, span: Span) -> Callable[[], object]:
        workers = Workers(num_threads)
        workers.kernel = lambda _: kernel  # type: ignore[method-assign, assignment]

        def step() -> None:
            for update in workers.run([(rule, span)], lambda: None, ()):
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
    if num_threads == 1:  # it runs in the thread that calls it
        compiled = torch.compile(inductor_step, dynamic=True, fullgraph=True)
        constants = [torch.tensor(each) for each in rule.constants]
        contestants["torch.compile, one pass with both casts"] = lambda: compiled(
            narrow, master, first, second, weight, *constants
        )
    theirs = deepspeed_step(master, gradient, first, second)
    if theirs is not None:

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


def deepspeed_step(master: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> Callable[[], object] | None:
    """Return a step of DeepSpeedCPUAdam on the same memory, its states too, where it is installed and compiles."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        parameter = torch.nn.Parameter(master)
        parameter.grad = gradient
        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01)
        step: Callable[[], object] = optimizer.step
        step()  # makes states of its own, in memory of torch
        optimizer.state[parameter].update(exp_avg=first, exp_avg_sq=second)
    except Exception as error:  # it compiles when it is made, and fails in many ways where it cannot
        print(f"DeepSpeedCPUAdam is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None
    return step


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
