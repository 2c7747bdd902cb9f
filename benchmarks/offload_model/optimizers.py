"""Processor time of one AdamW step on the CPU: what one pass over memory costs beside the ways there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smpkit.torch.offload_model.kernels import Adam, Span, one_pass, tiled

OPTIONS: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}


def measure(num_parameters: int, repetitions: int) -> dict[str, float]:
    """Return, by contestant, the least processor seconds of a step in this thread; they take turns."""
    torch.set_num_threads(1)
    contestants = make_contestants(num_parameters)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        step()  # compiles, and touches all memory
    for _ in range(repetitions):
        for name, step in contestants.items():
            start = time.thread_time()
            step()
            found[name].append(time.thread_time() - start)
    return {name: min(times) for name, times in found.items()}


def make_contestants(num_parameters: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    gradient = torch.randn(num_parameters)
    narrow, weight = gradient.bfloat16(), torch.zeros(num_parameters, dtype=torch.bfloat16)
    master, first, second = torch.randn(num_parameters), torch.zeros(num_parameters), torch.zeros(num_parameters)
    rule = Adam(**OPTIONS, decoupled=True, step=2, factor=1.0)

    def fused(with_gradient: Tensor) -> None:
        torch._fused_adamw_(
            [master],
            [with_gradient],
            [first],
            [second],
            [],
            [torch.tensor(2.0)],
            **OPTIONS,
            amsgrad=False,
            maximize=False,
        )

    wide = torch.empty(num_parameters)

    def three_passes() -> None:
        wide.copy_(narrow)
        fused(wide)
        weight.copy_(master)

    compiled = torch.compile(inductor_step, dynamic=True, fullgraph=True)
    constants = [torch.tensor(each) for each in rule.constants]
    wide_span = Span(gradient, master, (first, second), None)
    narrow_span = Span(narrow, master, (first, second), weight)
    contestants: dict[str, Callable[[], object]] = {
        "torch fused AdamW, fp32 only": lambda: fused(gradient),
        "smpkit, fp32 only": lambda: one_pass(rule, wide_span),
        "smpkit, one pass with both casts": lambda: one_pass(rule, narrow_span),
        "smpkit without a compiler, tiles with both casts": lambda: tiled(rule, narrow_span),
        "torch.compile, one pass with both casts": lambda: compiled(narrow, master, first, second, weight, *constants),
        "cast, torch fused AdamW, cast": three_passes,
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        parameter = torch.nn.Parameter(master.clone())
        parameter.grad = gradient
        contestants["DeepSpeedCPUAdam, fp32 only"] = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01).step
    except Exception as error:  # it compiles when it is imported, and fails in many ways where it cannot
        print(f"DeepSpeedCPUAdam is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
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
