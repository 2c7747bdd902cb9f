"""What each memory technique saves and costs: one transformer, one machine, each technique in processes of its own.

Memory is the most that a rank's process held beyond what it held before the model was created: weights, gradients,
optimizer states and activations of the steps. What Python and torch load on first use is loaded before. Time is
processor time of a step, summed over ranks, so other work on the machine changes it little; waits are not in it.

The table goes into README.md; a technique that is named runs beside none.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import smpkit.torch as smp
from benchmarks.common import mebibytes, parser, run, table
from benchmarks.pipeline.models import Block, GPTSize
from benchmarks.ranks import train_on_squares
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.testing import run_ranks, simulated_device

WIDTH, DEPTH, TOKENS, SAMPLES, STEPS = 256, 8, 256, 8, 3
SIZE: Final = GPTSize(width=WIDTH, num_heads=4)


TECHNIQUES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "plain": ("nothing: two replicas (`ddp: true`)", {"ddp": True}),
    "microbatches": ("`microbatches: 4`", {"ddp": True, "microbatches": 4}),
    "checkpointing": ("activation checkpointing", {"ddp": True}),
    "offloading": ("the same, and `offload_activations`", {"ddp": True, "offload_activations": True}),
    "bf16": ("`bf16: true`", {"ddp": True, "bf16": True}),
    "shard": ("`shard_optimizer_state`", {"ddp": True, "shard_optimizer_state": True}),
    "sharded": ("`sharded_data_parallel_degree: 2`", {"ddp": True, "sharded_data_parallel_degree": 2}),
    "pipeline": (
        "`pipeline_parallel_degree: 2`, `microbatches: 4`",
        {"pipeline_parallel_degree": 2, "microbatches": 4},
    ),
    "tensor": ("`tensor_parallel_degree: 2`", {"ddp": True, "tensor_parallel_degree": 2}),
    "both": (
        "pipeline, `microbatches: 4`, checkpointing and offloading",
        {"pipeline_parallel_degree": 2, "microbatches": 4, "offload_activations": True},
    ),
    "offload_model": ("`OffloadModel`, one rank, 8 slices, 4 microbatches", {}),
}
"""What the table calls it, and the configuration."""
CHECKPOINTED: Final = ("checkpointing", "offloading", "both")


def _held(name: str) -> int:
    """Return bytes of a line of the process's status: VmRSS, what it holds, or VmHWM, the most since the last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _before() -> int:
    """Load what training needs once in a process; return what the process holds then."""
    torch.set_num_threads(1)
    small = nn.Sequential(Block(SIZE))
    optimizer = torch.optim.AdamW(small.parameters())
    small(torch.randn(1, 2, WIDTH)).square().mean().backward()
    optimizer.step()
    del small, optimizer
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    return _held("VmRSS")


def measured(name: str) -> tuple[int, int, float]:
    """Train, and return the rank's peak, what of it lay on offloading's host side, and processor time of a step."""
    _, config = TECHNIQUES[name]
    smp.init(config)
    before = _before()
    torch.manual_seed(0)
    with smp.tensor_parallelism("tensor_parallel_degree" in config):
        module = nn.Sequential(*(Block(SIZE) for _ in range(DEPTH)))
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    if name in CHECKPOINTED:
        smp.set_activation_checkpointing(module, strategy="each")

    x = torch.randn(SAMPLES // smp.dp_size(), TOKENS, WIDTH)
    seconds = []
    for _ in range(STEPS):
        start = time.process_time()
        optimizer.zero_grad()
        train_on_squares(model, x)
        optimizer.step()
        seconds.append(time.process_time() - start)
    host = smp.offload_report().peak_host_bytes if "offload_activations" in config else 0
    return _held("VmHWM") - before, host, statistics.median(seconds[1:])


def measured_offload_model() -> tuple[int, float]:
    """Do the same with the whole batch on one rank, on whose host all of it is; return the peak and the seconds."""
    before = _before()
    ends = [time.process_time() for _ in _steps_of_offload_model("cpu")]
    return _held("VmHWM") - before, statistics.median(end - start for start, end in itertools.pairwise(ends))


def simulated_offload_model() -> int:
    """Return the peak on a simulated device, in bytes."""
    simulated_device.load()
    before = torch.accelerator.memory_allocated()
    for _ in _steps_of_offload_model("sim"):
        pass
    return torch.accelerator.max_memory_allocated() - before


def _steps_of_offload_model(device: str) -> Iterator[None]:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(SIZE) for _ in range(DEPTH)))
    model = OffloadModel(module, device, num_slices=DEPTH, checkpoint_activation=True, num_microbatches=4)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW)
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    for _ in range(STEPS + 1):
        model(x).square().mean().backward()
        optimizer.step()
        model.synchronize()
        yield


def techniques(names: Sequence[str], options: argparse.Namespace) -> tuple[str, object]:
    """Return a row per technique, each relative to the first."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory goes back to the system
    base_bytes, base_seconds, rows = 0, 0.0, []
    for name in names[:1] if options.quick else names:
        if name == "offload_model":
            [(held, took)] = run_ranks(measured_offload_model, 1, timeout=300)
            [on_device] = run_ranks(simulated_offload_model, 1, timeout=300)
            ranks = [(held + on_device, held, took)]
        else:
            ranks = run_ranks(measured, 2, name, timeout=300)
        peak, host = max((peak - host, host) for peak, host, _ in ranks)
        seconds = sum(took for *_, took in ranks)
        base_bytes, base_seconds = base_bytes or peak, base_seconds or seconds
        figures = [mebibytes(peak), mebibytes(host) if host else "", f"{1 - peak / base_bytes:.0%}"]
        rows.append([TECHNIQUES[name][0], *figures, f"{seconds / base_seconds:.2f} ×"])
    heads = ["technique", "device memory of the fuller rank", "on the host", "saved on the device", "processor time"]
    return table(heads, rows), rows


if __name__ == "__main__":
    alone = {name: partial(techniques, ["plain", name]) for name in TECHNIQUES}
    run(__file__, parser(__doc__), {"table": partial(techniques, list(TECHNIQUES)), **alone}, default=["table"])
