"""One rank of the benchmark: run the contestants in turns and let rank 0 write times and traffic down (see main.py)."""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import smpkit.torch as smp
from benchmarks.tensor_parallel.contestants import Block, dtensor_block, dtensor_mlp, mlp, smpkit_block, smpkit_mlp
from benchmarks.tensor_parallel.counted import counted
from smpkit.torch.core.devices import wait_for_stream
from smpkit.torch.core.runtime import state
from smpkit.torch.tensor_parallel.layouts import Layout

LENGTH = 64
SAMPLES = 4
"""Of one rank, or of the common batch."""
WARM_UPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--widths", type=json.loads, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    size = int(os.environ["WORLD_SIZE"])
    smp.init({"tensor_parallel_degree": size, "ddp": True, "optimize": "speed"})
    mesh = init_device_mesh(state.device.type, (size,))
    cells = [
        cell(kind, width, boundary, mesh, options.repetitions)
        for kind in ("MLP", "transformer layer")
        for width in options.widths
        for boundary in (Layout.REPLICATE, Layout.SHARD_BATCH)
    ]
    if smp.rank() == 0:
        device = torch.cuda.get_device_name() if state.device.type == "cuda" else "no GPU"
        about = {"load": os.getloadavg()[1], "torch": torch.__version__, "device": device}
        options.out.write_text(json.dumps({"cells": cells, **about}))
    smp.shutdown()


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
    steps = {name: step_of(module, x) for name, module in modules.items()}
    outputs = [module(x) for module in modules.values()]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    for _ in range(WARM_UPS):
        for step in steps.values():
            step()
    traffic = {name: counted(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions):
        for name, step in steps.items():
            times[name].append(timed(step))
    return {
        "kind": kind,
        "width": width,
        "boundary": boundary.value,
        "times": times,
        "messages": {name: dict(each.messages) for name, each in traffic.items()},
        "bytes": {name: sum(each.bytes.values()) for name, each in traffic.items()},
    }


def step_of(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        module(x.clone().requires_grad_()).sum().backward()

    return step


def timed(step: Callable[[], None]) -> float:
    """Return the seconds from a barrier until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    wait_for_stream(state.device)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


if __name__ == "__main__":
    main()
