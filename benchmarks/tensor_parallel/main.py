"""Run smpkit's tensor parallelism and torch's DTensor in turns on the same blocks; write the table of README.md."""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import smpkit.torch as smp
from benchmarks.common import milliseconds, parser, ratio, run, table
from benchmarks.ranks import OVER_GLOO, on_ranks, time_steps
from benchmarks.tensor_parallel.contestants import Block, dtensor_block, dtensor_mlp, mlp, smpkit_block, smpkit_mlp
from benchmarks.tensor_parallel.counted import counted
from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel.layouts import Layout

LENGTH = 64
SAMPLES = 4
"""Samples of each rank, or of the batch that all share."""


def blocks(options: argparse.Namespace) -> tuple[str, object]:
    """Return a row per block, width and layout between blocks."""
    widths = [64] if options.quick else [512, 2048] if torch.cuda.is_available() else [64, 512]
    cells = on_ranks(measure, 2, options.repetitions, widths)[0]
    heads = ["block", "width", "boundary", "smpkit", "DTensor", "ratio of medians (fastest)", "messages", "MiB"]
    return table(heads, map(row, cells)), cells


def row(cell: dict[str, Any]) -> list[object]:
    """Return times, their ratio, messages and bytes of a cell."""
    ours, theirs = cell["times"].values()
    both = [milliseconds(times, digits=2) for times in (ours, theirs)]
    sent, size = " / ".join(map(str, cell["messages"])), " / ".join(f"{size / 2**20:.2f}" for size in cell["bytes"])
    return [cell["kind"], cell["width"], cell["boundary"], *both, ratio(ours, theirs), sent, size]


def measure(repetitions: int, widths: Sequence[int]) -> list[dict[str, Any]]:
    """Measure all cells on this rank."""
    smp.init({"tensor_parallel_degree": int(os.environ["WORLD_SIZE"]), "ddp": True, "optimize": "speed"})
    mesh = init_device_mesh(state.device.type, (smp.size(),))
    return [
        cell(kind, width, boundary, mesh, repetitions)
        for kind in ("MLP", "transformer layer")
        for width in widths
        for boundary in (Layout.REPLICATE, Layout.SHARD_BATCH)
    ]


def cell(kind: str, width: int, boundary: Layout, mesh: DeviceMesh, repetitions: int) -> dict[str, Any]:
    """Measure one block: both contestants have the same weights and input."""
    torch.manual_seed(0)
    with state.device:
        plain = mlp(width) if kind == "MLP" else Block(width)
    make, divide = (smpkit_mlp, dtensor_mlp) if kind == "MLP" else (smpkit_block, dtensor_block)
    ours = make(plain, width, boundary).to(state.device)
    modules = {"smpkit": ours, "DTensor": divide(copy.deepcopy(plain), mesh, boundary)}
    torch.manual_seed(1 + smp.rank() * (boundary is Layout.SHARD_BATCH))
    x = torch.randn(SAMPLES, LENGTH, width).to(state.device)
    torch.testing.assert_close(*[module(x) for module in modules.values()], rtol=1e-3, atol=1e-4)
    steps = {name: partial(step, module, x) for name, module in modules.items()}
    times = time_steps(steps, repetitions)
    traffic = [counted(step) for step in steps.values()]
    return {
        "kind": kind,
        "width": width,
        "boundary": boundary.value,
        "times": times,
        "messages": [sum(counts.messages.values()) for counts in traffic],
        "bytes": [sum(counts.bytes.values()) for counts in traffic],
    }


def step(module: nn.Module, x: torch.Tensor) -> None:
    module.zero_grad()
    module(x.clone().requires_grad_()).sum().backward()


if __name__ == "__main__":
    run(__file__, parser(__doc__, repetitions=30), {"table": blocks}, about=OVER_GLOO)
