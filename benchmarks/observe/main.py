"""What the block at the end of a run, its events and its status page cost of a step: with and without them, in turns.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.observe.main
    torchrun --standalone --nproc-per-node 1 -m benchmarks.observe.main

One job trains in blocks of 50 steps, of which the sample has one that is recorded and written. In every other block
all of it is switched off. CPU time of the whole process is compared, which other programs of the machine change least;
wall time stands beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smpkit.torch as smp
from smpkit.observe.runs import RUN_DIR
from smpkit.observe.status import STATUS_DIR
from smpkit.torch.core import status
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed import recorder

WIDTH, LAYERS, MICROBATCHES, ROWS = 256, 8, 4, 256
BLOCK, TURNS = 50, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(nn.functional.gelu(self.up(self.norm(value))))


@smp.step
def train_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    model.backward(loss)
    return loss


class Watch:
    """All that is compared, and a switch for it."""

    def __init__(self) -> None:
        self._recorder, self._page = recorder.latest_recorder(), status.current_page()
        assert self._recorder is not None
        assert self._page is not None

    def set(self, on: bool) -> None:
        recorder._recorder = self._recorder if on else None
        status._page = self._page if on else None
        if not on:
            assert self._recorder is not None
            self._recorder._recording = False
            self._recorder._listen()


def run_block(model: Any, optimizer: Any, batch: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of CPU and of the clock that a step took on average."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(BLOCK):
        optimizer.zero_grad()
        train_step(model, batch)
        optimizer.step()
    return (time.process_time() - cpu) / BLOCK, (time.perf_counter() - wall) / BLOCK


def main() -> None:
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ[RUN_DIR], os.environ[STATUS_DIR] = folder, folder
        smp.init({"pipeline_parallel_degree": size, "microbatches": MICROBATCHES})
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(*(Block() for _ in range(LAYERS))))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        batch = torch.randn(ROWS, WIDTH)
        run_block(model, optimizer, batch)  # plans, and takes the sample past its first steps
        watch, found = Watch(), {True: [], False: []}  # type: dict[bool, list[tuple[float, float]]]
        for turn in range(2 * TURNS):
            on = turn % 4 in (0, 3)  # off, on, on, off: a machine that gets slower favours neither
            watch.set(on)
            smp.barrier()
            found[on].append(run_block(model, optimizer, batch))
        watch.set(True)
        print(json.dumps(figures(found)), flush=True)
        smp.shutdown()
        size_of_events = sum(path.stat().st_size for path in Path(folder).glob("events/*"))
        if not int(os.environ["RANK"]):
            print(json.dumps({"bytes of events": size_of_events}), flush=True)


def figures(found: dict[bool, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return medians, and the median of what a block took longer than its neighbour."""
    result: dict[str, Any] = {"rank": state.rank, "ranks": state.size}
    for position, name in enumerate(("cpu", "wall")):
        on, off = ([each[position] for each in found[key]] for key in (True, False))
        ratios = [one / other for one, other in zip(on, off, strict=True)]
        result[f"{name} ms, watched"] = round(1e3 * statistics.median(on), 3)
        result[f"{name} ms, not"] = round(1e3 * statistics.median(off), 3)
        result[f"{name}, share"] = round(statistics.median(ratios) - 1, 5)
    return result


if __name__ == "__main__":
    main()
