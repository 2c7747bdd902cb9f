"""What the engine itself costs: CPU microseconds of Python per remote unit, owned unit, operation and microbatch.

Two gloo ranks run steps whose layers compute next to nothing, and each counts the CPU time of its main thread, which
does not depend on what else the machine runs or on how long messages take. A cost per unit or operation is a slope:
the same step with many and with few of them. The cost per microbatch stands beside that of torch's 1F1B.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import smpkit.torch as smp
from benchmarks.pipeline.contestants import smpkit_step, torch_step
from benchmarks.pipeline.worker import init
from smpkit.torch.core.runtime import state

MICROBATCHES = 32
FEW, MANY = 2, 42
WARM_UPS = 5
NAMES = ("smpkit", "torch 1F1B")

Figures = dict[str, list[float]]
"""Microseconds on each rank."""


class Scale(nn.Module):
    """As little work as a layer with a weight can do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


class Chain(nn.Module):
    """Some layers here, some there, and operations between them where the data is."""

    def __init__(self, num_first: int, num_second: int, num_operations: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(Scale() for _ in range(num_first))
        self.second = nn.ModuleList(Scale() for _ in range(num_second))
        self.num_operations = num_operations

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.first:
            value = layer(value)
        for _ in range(self.num_operations):
            value = value * 2.0
        for layer in self.second:
            value = layer(value)
        return value


def mean(output: Tensor, _target: Tensor) -> Tensor:
    return output.mean()


@smp.step
def _train(model: Any, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).mean()
    model.backward(loss)
    return loss


@smp.step
def _forward(model: Any, inputs: Tensor) -> Tensor:
    result: Tensor = model(inputs).mean()
    return result


def chain_cost(shape: tuple[int, int, int], repetitions: int, *, train: bool) -> float:
    """Return microseconds per microbatch of a Chain's step on this rank."""
    init(MICROBATCHES)
    module = Chain(*shape)
    for layer in module.first:
        smp.set_partition(layer, 0)
    for layer in module.second:
        smp.set_partition(layer, 1)
    model = smp.DistributedModel(module)
    inputs = torch.zeros(MICROBATCHES, 8)
    step = _train if train else _forward

    def run() -> None:
        with torch.set_grad_enabled(train):
            step(model, inputs)

    return cpu_microseconds(run, repetitions)


def cpu_microseconds(step: Callable[[], object], repetitions: int) -> float:
    """Return the median CPU time of this thread per microbatch."""
    return statistics.median(in_turns([step], repetitions)[0])


def in_turns(steps: Sequence[Callable[[], object]], repetitions: int) -> list[list[float]]:
    """Return each step's CPU times of this thread per microbatch; other load slows all steps alike."""
    spent: list[list[float]] = [[] for _ in steps]
    for repetition in range(WARM_UPS + repetitions):
        for step, times in zip(steps, spent, strict=True):
            dist.barrier()
            started = time.thread_time_ns()
            step()
            if repetition >= WARM_UPS:
                times.append((time.thread_time_ns() - started) / 1000 / MICROBATCHES)
    return spent


def slopes(repetitions: int) -> dict[str, float]:
    """Return microseconds per remote unit, owned unit and operation, forward and backward, on this rank."""
    found = {}
    for mode, train in (("forward", False), ("forward and backward", True)):
        base = chain_cost((FEW, FEW, 0), repetitions, train=train)
        shapes = {"layers of rank 0": (MANY, FEW, 0), "layers of rank 1": (FEW, MANY, 0)}
        shapes["operations on rank 0"] = (FEW, FEW, MANY - FEW)
        for name, shape in shapes.items():
            found[f"{name}, {mode}"] = (chain_cost(shape, repetitions, train=train) - base) / (MANY - FEW)
    found["the same layers alone, forward"] = plain_cost(train=False)
    found["the same layers alone, forward and backward"] = plain_cost(train=True)
    return found


def plain_cost(*, train: bool) -> float:
    """Return microseconds of one layer in plain PyTorch."""
    layers = nn.Sequential(*[Scale() for _ in range(MANY)])
    inputs = torch.zeros(1, 8)
    spent = []
    for _ in range(200):
        started = time.thread_time_ns()
        with torch.set_grad_enabled(train):
            loss = layers(inputs).mean()
            if train:
                loss.backward()
        spent.append(time.thread_time_ns() - started)
    return statistics.median(spent) / 1000 / MANY


def bytecodes() -> dict[str, float]:
    """Return how many bytecodes of Python one more microbatch takes: the same on every machine, however busy."""
    few, many = MICROBATCHES // 2, MICROBATCHES
    counts = [list(map(bytecodes_of, both(number))) for number in (few, many)]
    return {
        f"a microbatch, {name}": (more - less) / (many - few) for name, less, more in zip(NAMES, *counts, strict=True)
    }


def bytecodes_of(step: Callable[[], object]) -> int:
    """Return how many bytecodes this thread runs in a step."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    for _ in range(WARM_UPS):
        step()
    sys.settrace(trace)
    step()
    sys.settrace(None)
    return count


def both(num_microbatches: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return steps with one layer per rank, of smpkit and of torch's 1F1B."""
    init(num_microbatches)
    inputs, targets = torch.zeros(num_microbatches, 8), torch.zeros(num_microbatches, 1)
    chunks = [range(rank, rank + 1) for rank in range(smp.size())]
    theirs = torch_step(
        "1F1B", nn.Sequential(Scale(), Scale()), chunks, mean, inputs, targets, num_microbatches=num_microbatches
    )
    ours = smpkit_step(nn.Sequential(Scale(), Scale()), chunks, mean, inputs, targets)
    return ours, theirs


def beside_torch(repetitions: int) -> dict[str, float]:
    """Return microseconds per microbatch, by smpkit and by torch's 1F1B, which take turns."""
    spent = dict(zip(NAMES, in_turns(both(MICROBATCHES), repetitions), strict=True))
    fastest = {f"a microbatch, {name}, fastest step": min(times) for name, times in spent.items()}
    return fastest | {f"a microbatch, {name}, median step": statistics.median(times) for name, times in spent.items()}


def gathered(mine: dict[str, float]) -> Figures:
    """Return the figures of all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {name: [figures[name] for figures in every] for name in mine}


def table(figures: Figures, unit: str) -> str:
    lines = [f"| {unit} per ... | rank 0 | rank 1 |", "|---|---|---|"]
    return "\n".join([*lines, *[f"| {name} | {a:.1f} | {b:.1f} |" for name, (a, b) in figures.items()]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--count", action="store_true", help="count bytecodes of a microbatch, and measure no times")
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module"]
        # torch measures nothing; what the summary of the run costs is in benchmarks/observe.
        os.environ["SMPKIT_SUMMARY"] = "0"
        os.execv(sys.executable, [*torchrun, "benchmarks.pipeline.overhead", *(arguments or sys.argv[1:])])
    torch.set_num_threads(1)
    measured = bytecodes() if options.count else {**beside_torch(options.repetitions), **slopes(options.repetitions)}
    figures = gathered(measured)
    if state.rank == 0:
        print(table(figures, "bytecodes" if options.count else "CPU µs"), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(figures))
    smp.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
