"""What the block at the end of a run, its events and its status page cost of a step: with and without them, in turns.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.observe.main
    torchrun --standalone --nproc-per-node 1 -m benchmarks.observe.main

The costs do not depend on how large layers are, so these compute next to nothing, and the costs stand out: those of a
step that is recorded and written, and those of one that is only timed, of which there are 49 for each recorded one.
CPU time of the whole process is compared, which other programs of the machine change least.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from typing import Any, Final

import torch
from torch import nn

import smpkit.torch as smp
from smpkit.observe.runs import RUN_DIR
from smpkit.observe.status import STATUS_DIR
from smpkit.torch.core import status
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed import recorder

WIDTH, LAYERS, MICROBATCHES = 8, 8, 4
BLOCK, TURNS, EVERY = 20, 24, 50
STATES: Final = ("off", "timed", "recorded")


@smp.step
def train_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    model.backward(loss)
    return loss


class Watch:
    """All that is compared, and a switch for it."""

    def __init__(self) -> None:
        found = recorder.latest_recorder()
        assert found is not None
        self._recorder, self._page = found, status.current_page()
        assert self._page is not None

    def set(self, how: str) -> None:
        recorder._recorder = None if how == "off" else self._recorder
        status._page = None if how == "off" else self._page
        self._recorder._is_wanted = lambda name: how == "recorded"  # type: ignore[method-assign]  # noqa: ARG005
        self._recorder._recording = False
        self._recorder._listen()


def block_seconds(model: Any, optimizer: Any, batch: torch.Tensor) -> float:
    """Return the seconds of CPU that a step took on average."""
    began = time.process_time()
    for _ in range(BLOCK):
        optimizer.zero_grad()
        train_step(model, batch)
        optimizer.step()
    return (time.process_time() - began) / BLOCK


def main() -> None:
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({RUN_DIR: folder, STATUS_DIR: folder, "SMPKIT_SUMMARY": "0"})
        smp.init({"pipeline_parallel_degree": size, "microbatches": MICROBATCHES})
        model = smp.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        batch = torch.randn(2 * MICROBATCHES, WIDTH)
        block_seconds(model, optimizer, batch)
        watch = Watch()
        found: dict[str, list[float]] = {how: [] for how in STATES}
        for turn in range(TURNS):
            for how in STATES if turn % 2 else reversed(STATES):
                watch.set(how)
                smp.barrier()
                found[how].append(block_seconds(model, optimizer, batch))
        watch.set("timed")
        print(json.dumps(figures(found)), flush=True)
        smp.shutdown()


def figures(found: dict[str, list[float]]) -> dict[str, Any]:
    """Return microseconds, and the share of steps of some lengths that they are."""

    def more(how: str) -> float:
        return 1e6 * statistics.median(one - off for one, off in zip(found[how], found["off"], strict=True))

    mean = ((EVERY - 1) * more("timed") + more("recorded")) / EVERY
    return {
        "rank": state.rank,
        "ranks": state.size,
        "step, us": round(1e6 * statistics.median(found["off"])),
        "timed, us more": round(more("timed"), 1),
        "recorded, us more": round(more("recorded"), 1),
        "mean, us more": round(mean, 1),
        "share of a step of 20 ms": round(mean / 20_000, 5),
        "share of a step of 100 ms": round(mean / 100_000, 5),
    }


if __name__ == "__main__":
    main()
