"""One rank of the benchmark: run the contestants in turns and let rank 0 write the times down (see main.py)."""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import smpkit.torch as smp
from benchmarks.pipeline.contestants import TORCH_SCHEDULES, Step, one_process, smpkit_step, torch_step
from benchmarks.pipeline.models import (
    ON_A_GPU,
    TINY,
    GPTSize,
    HalvedSleepLayer,
    SleepLayer,
    cut,
    gpt,
    gpt_batch,
    gpt_loss,
    sleep_loss,
)
from smpkit.torch.core.runtime import state

Times = dict[str, dict[str, Any]]

WARM_UPS = 5
"""Steps that are not counted: within them smpkit measures, plans again and tries it, torch exchanges shapes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--cells", type=json.loads, help="[[microbatches, num_floats], ...]; none: the GPT")
    parser.add_argument("--quick", action="store_true", help="the GPT: a tiny one")
    parser.add_argument("--schedules", action="store_true", help="compare all kinds of schedules in the cells")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    if arguments.cells:
        cell = schedules_cell if arguments.schedules else sleep_cell
        results = [cell(count, num_floats, arguments.repetitions) for count, num_floats in arguments.cells]
    else:
        results = [gpt_cell(arguments.repetitions, quick=arguments.quick)]
    if state.rank == 0:
        arguments.out.write_text(json.dumps(results))
    smp.shutdown()


def init(num_microbatches: int, **more: Any) -> None:
    """Start smpkit over all ranks, placed by hand."""
    smp.shutdown()
    smp.init(
        {
            "pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]),
            "microbatches": num_microbatches,
            "auto_partition": False,
            "default_partition": 0,
            "ddp": True,
            **more,
        }
    )


def sleep_cell(num_microbatches: int, num_floats: int, repetitions: int) -> dict[str, Any]:
    init(num_microbatches)
    size = smp.size()
    chunks = [range(rank, rank + 1) for rank in range(size)]
    inputs, targets = torch.zeros(num_microbatches, 1), torch.zeros(num_microbatches, 1)

    def layers() -> nn.Sequential:
        return nn.Sequential(*[SleepLayer(num_floats) for _ in range(size)])

    contestants = {
        "torch 1F1B": torch_step(
            "1F1B", layers(), chunks, sleep_loss, inputs, targets, num_microbatches=num_microbatches
        ),
        "smpkit": smpkit_step(layers(), chunks, sleep_loss, inputs, targets),
    }
    times = measure(contestants, repetitions)
    return {"size": size, "microbatches": num_microbatches, "num_bytes": 4 * num_floats, "times": times, **about()}


ROUNDS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("interleaved", {}, ("1F1B",)),
    ("2 virtual stages", {"virtual_pipeline_degree": 2}, ("interleaved 1F1B",)),
    ("zero bubble", {"pipeline": "zero_bubble"}, ("interleaved zero bubble", "ZBV zero bubble")),
)
"""Name and configuration of smpkit's schedules, and those of torch that run in turns with each."""


def schedules_cell(num_microbatches: int, num_floats: int, repetitions: int) -> dict[str, Any]:
    """Time every kind of schedule on two half layers per rank, whose backward can be split."""
    times: Times = {}
    for name, more, theirs in ROUNDS:
        init(num_microbatches, **more)
        size = smp.size()
        inputs, targets = torch.zeros(num_microbatches, 1), torch.zeros(num_microbatches, 1)

        def layers(count: int = 2 * size) -> nn.Sequential:
            return nn.Sequential(*[HalvedSleepLayer(num_floats, 2) for _ in range(count)])

        contestants: dict[str, Step] = {}
        for kind in theirs:
            contestants[f"torch {kind}"] = torch_step(
                kind,
                layers(),
                even(2 * size, size * TORCH_SCHEDULES[kind][1]),
                sleep_loss,
                inputs,
                targets,
                num_microbatches=num_microbatches,
            )
        ours = even(2 * size, size * more.get("virtual_pipeline_degree", 1))
        contestants[f"smpkit {name}"] = smpkit_step(layers(), ours, sleep_loss, inputs, targets)
        times |= measure(contestants, repetitions)
    return {"size": size, "microbatches": num_microbatches, "num_bytes": 4 * num_floats, "times": times}


def even(num_layers: int, num_chunks: int) -> list[range]:
    """Cut layers into chunks of the same size."""
    size = num_layers // num_chunks
    return [range(size * chunk, size * (chunk + 1)) for chunk in range(num_chunks)]


def gpt_cell(repetitions: int, *, quick: bool) -> dict[str, Any]:
    """Time the GPT on this rank's device: on a GPU that ranks share, values go over gloo."""
    size = TINY if quick else ON_A_GPU if torch.cuda.is_available() else GPTSize()
    init(size.num_microbatches)
    device = state.device
    inputs, targets = (each.to(device) for each in gpt_batch(size))
    lr = 0.05
    contestants: dict[str, Step] = {}
    absent = {}
    for name, (_, per_rank) in TORCH_SCHEDULES.items():
        if device.type == "cuda" and dist.get_backend() == "gloo":
            absent[f"torch {name}"] = "gloo sends no tensors of a GPU from rank to rank"
            continue
        chunks = cut(size.num_layers, per_rank * smp.size())
        contestants[f"torch {name}"] = torch_step(
            name, gpt(size), chunks, gpt_loss, inputs, targets, num_microbatches=size.num_microbatches, lr=lr
        )
    contestants["smpkit"] = smpkit_step(gpt(size), cut(size.num_layers, smp.size()), gpt_loss, inputs, targets, lr)
    alone = one_process(gpt(size).to(device), gpt_loss, inputs, targets, num=size.num_microbatches, lr=lr)
    contestants["one process"] = lambda: alone() if state.rank == 0 else None
    return {"size": smp.size(), "times": measure(contestants, repetitions), "absent": absent, **about()}


def measure(contestants: Mapping[str, Step], repetitions: int) -> Times:
    """Time the contestants in turns, from a barrier until all ranks are done; every one starts with its warm-ups."""
    times: Times = {name: {"seconds": [], "losses": []} for name in contestants}
    for repetition in range(WARM_UPS + repetitions):
        for name, step in contestants.items():
            dist.barrier()
            started = time.perf_counter()
            loss = step()
            seconds = torch.tensor([time.perf_counter() - started, float("-inf") if loss is None else loss])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name]["losses"].append(float(seconds[1]))
            if repetition >= WARM_UPS:
                times[name]["seconds"].append(float(seconds[0]))
    return times


def about() -> dict[str, Any]:
    """Tell which schedule smpkit chose."""
    assert state.model is not None
    assert state.model.pipeline is not None
    executor = state.model.pipeline._executor
    assert executor is not None
    schedule = next(iter(executor.schedules.values()))
    return {"live": list(schedule.peak_live_microbatches)}


if __name__ == "__main__":
    main()
