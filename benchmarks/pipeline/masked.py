"""Steps per second of a loss of what a mask selects, beside the same loss of all elements, on two ranks.

Labels are ignored by chance, so that each microbatch of each step has another number of targets: a kind of call that is
new nearly every time. Both losses have the same labels, and the two kinds of step alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import smpkit.torch as smp
from benchmarks.pipeline.models import GPTSize, cut, gpt
from benchmarks.pipeline.worker import WARM_UPS, init
from smpkit.torch.core.runtime import state

IGNORED = -100
SIZE = GPTSize(vocabulary=1024, context=64, num_layers=6)


@smp.step
def masked(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    logits, mask = model(tokens), labels != IGNORED
    loss = functional.cross_entropy(logits[mask], labels[mask])
    model.backward(loss)
    return loss


@smp.step
def unmasked(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    model.backward(loss)
    return loss


def seconds_of(step: Any, model: Any, number: int) -> float:
    """Return how long a step takes until the last rank is done."""
    generator = torch.Generator().manual_seed(number)
    shape = SIZE.num_microbatches * SIZE.microbatch_size, SIZE.context
    tokens = torch.randint(SIZE.vocabulary, shape, generator=generator)
    labels = tokens.masked_fill(torch.rand(shape, generator=generator) < 0.5, IGNORED)
    model.zero_grad()
    dist.barrier()
    started = time.perf_counter()
    step(model, tokens, labels)
    dist.barrier()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module"]
        os.execv(sys.executable, [*torchrun, "benchmarks.pipeline.masked", *(arguments or sys.argv[1:])])
    torch.set_num_threads(1)
    init(SIZE.num_microbatches)
    module = gpt(SIZE)
    for rank, layers in enumerate(cut(SIZE.num_layers, smp.size())):
        for index in layers:
            smp.set_partition(module[index], rank)
    model = smp.DistributedModel(module)
    times: dict[str, list[float]] = {"unmasked": [], "masked": []}
    for number in range(WARM_UPS + options.repetitions):
        times["unmasked"].append(seconds_of(unmasked, model, number))
        times["masked"].append(seconds_of(masked, model, number))
    if state.rank == 0:
        for name, each in times.items():
            counted = each[WARM_UPS:]
            fastest, median = min(counted), statistics.median(counted)
            print(f"{name:9} {1 / fastest:.2f} steps per second in the fastest step, {1 / median:.2f} in the median")
    smp.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
