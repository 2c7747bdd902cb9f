"""What the block at the end of a run, its events and its status page cost of a step: with and without them, in turns.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.observe.main
    torchrun --standalone --nproc-per-node 2 -m benchmarks.observe.main --count

The costs do not depend on how large layers are, so these compute next to nothing, and the costs stand out: those of a
step that is recorded and written, and those of one that is only timed, of which there are 49 for each recorded one.
Times are CPU time of the thread that trains, so that neither waiting for other ranks nor other programs of the machine
count. `--count` counts Python's bytecodes and calls instead, which are the same in every run.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

import smpkit.torch as smp
from smpkit.observe.runs import RUN_DIR
from smpkit.observe.status import STATUS_DIR
from smpkit.torch.core import status
from smpkit.torch.core.runtime import state
from smpkit.torch.recording import recorder
from smpkit.torch.recording.run_meter import Sampling

WIDTH, LAYERS, MICROBATCHES = 8, 8, 4
WARM_UPS, TURNS, COUNTED, EVERY = 40, 400, 10, 50
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
        status.use_page(None if how == "off" else self._page)
        self._recorder._sampling = sampling = Sampling(sys.maxsize)
        if how != "recorded":
            sampling._left["train_step"] = sys.maxsize
        self._recorder._recording = False
        self._recorder._listen()


class Count:
    """Counts the bytecodes and calls of Python in this thread."""

    def __init__(self) -> None:
        self.bytecodes = self.calls = 0

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _: object) -> Any:
        self.calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, _frame: FrameType, event: str, _: object) -> Any:
        self.bytecodes += event == "opcode"
        return self._opcode


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    size = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({RUN_DIR: folder, STATUS_DIR: folder, "SMPKIT_SUMMARY": "0"})
        smp.init({"pipeline_parallel_degree": size, "microbatches": MICROBATCHES})
        model = smp.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        batch = torch.randn(2 * MICROBATCHES, WIDTH)

        def step() -> None:
            optimizer.zero_grad()
            train_step(model, batch)
            optimizer.step()

        for _ in range(WARM_UPS):
            step()
        watch = Watch()
        found = counted(step, watch) if "--count" in sys.argv else timed(step, watch)
        watch.set("timed")
        for rank in range(size):
            if state.rank == rank:
                print(json.dumps({"rank": rank, "ranks": size, **found}), flush=True)
            smp.barrier()
        smp.shutdown()


def counted(step: Callable[[], None], watch: Watch) -> dict[str, Any]:
    """Return bytecodes and calls of a step."""
    found: dict[str, Any] = {}
    for how in STATES:
        watch.set(how)
        step()
        count = Count()
        with count:
            for _ in range(COUNTED):
                step()
        found[how] = {"bytecodes": count.bytecodes / COUNTED, "calls": count.calls / COUNTED}
    return found


def timed(step: Callable[[], None], watch: Watch) -> dict[str, Any]:
    """Return microseconds, and the share of steps of some lengths that they are."""
    seconds: dict[str, list[float]] = {how: [] for how in STATES}
    for turn in range(TURNS):
        for how in STATES if turn % 2 else reversed(STATES):
            watch.set(how)
            began = time.thread_time()
            step()
            seconds[how].append(time.thread_time() - began)
    medians = {how: 1e6 * statistics.median(found) for how, found in seconds.items()}
    more = {how: medians[how] - medians["off"] for how in STATES[1:]}
    mean = ((EVERY - 1) * more["timed"] + more["recorded"]) / EVERY
    return {
        "step, us": round(medians["off"]),
        **{f"{how}, us more": round(value, 1) for how, value in more.items()},
        "mean, us more": round(mean, 1),
        "share of a step of 20 ms": round(mean / 20_000, 5),
        "share of a step of 100 ms": round(mean / 100_000, 5),
    }


if __name__ == "__main__":
    main()
