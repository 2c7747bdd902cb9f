"""What needs a GPU: its constants, training steps of all contestants, and a stage of a pipeline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.activation_offload.blocks import Block
from benchmarks.activation_offload.stage import run_stage
from benchmarks.activation_offload.training import Sizes, training_rows
from smpkit.plan.offload.simulate import ON_A_GPU, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.offload.engine import make_engine

__all__ = ["gpu_tables"]

_MIB: Final = 1 << 20
_WIDTH, _HEADS = 4096, 32
_RANKS, _MICROBATCHES, _STAGE_LAYERS, _STAGE_TOKENS = 8, 16, 8, 8 << 10

Row = dict[str, Any]


def gpu_tables(sizes: Sizes, *, only_steps: bool) -> list[Row]:
    """Return the rows of all tables, each printed at once; without a GPU those of training steps only."""
    rows = []
    for row in _rows(sizes, only_steps=only_steps or not torch.cuda.is_available()):
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _rows(sizes: Sizes, *, only_steps: bool) -> Iterator[Row]:
    if only_steps:
        yield from training_rows(sizes)
        return
    torch.manual_seed(0)
    constants = _constants()
    yield {"table": "Constants", **constants}
    torch.cuda.empty_cache()
    yield from training_rows(sizes)
    yield from _pipeline(LinkSpeed(constants["out GB/s"] * 1e9, constants["back GB/s"] * 1e9))


# --- constants --------------------------------------------------------------------------------------------------------


def _constants() -> dict[str, float]:
    """Measure the link alone, both ways at once, and beside a matrix product; and that product beside copies."""
    device = torch.empty(256 * _MIB, dtype=torch.uint8, device="cuda")
    hosts = [torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    other, side = torch.empty_like(device), [torch.cuda.Stream(), torch.cuda.Stream()]
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def out() -> None:
        with torch.cuda.stream(side[0]):
            hosts[0].copy_(device, non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(side[1]):
            other.copy_(hosts[1], non_blocking=True)

    def product() -> None:
        torch.mm(matrix, matrix)

    def both() -> None:
        out()
        back()

    num_bytes, flops = device.numel(), 2 * 8192**3
    alone = _seconds(product, 20)

    count = int(num_bytes / 50e9 / alone) + 1

    def beside() -> None:
        both()
        for _ in range(count):
            product()

    return {
        "out GB/s": num_bytes / _seconds(out, 10) / 1e9,
        "back GB/s": num_bytes / _seconds(back, 10) / 1e9,
        "both GB/s": 2 * num_bytes / _seconds(both, 10) / 1e9,
        "bf16 TFLOP/s": flops / alone / 1e12,
        "products beside copies / alone": _seconds(beside, 10) / (count * alone),
    }


def _seconds(run: Callable[[], object], count: int) -> float:
    """Return the time of one of `count` runs after another, until the device is idle."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


# --- a stage of a pipeline --------------------------------------------------------------------------------------------


def _pipeline(link: LinkSpeed) -> Iterator[Row]:
    """Yield a row per horizon for the first stage of a pipeline, run alone; measured and predicted."""
    title = f"First stage of {_RANKS}, {_MICROBATCHES} microbatches of {_STAGE_TOKENS} tokens, {_STAGE_LAYERS} blocks"
    with torch.device("cuda"):
        layers = [Block(_WIDTH, _HEADS).to(torch.bfloat16) for _ in range(_STAGE_LAYERS)]
    actions = one_f_one_b(_RANKS, _MICROBATCHES).actions[0]
    boundary = 2 * _STAGE_TOKENS * _WIDTH

    def make_input() -> Tensor:
        return torch.randn(1, _STAGE_TOKENS, _WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def measured(horizon: int | None, *, offloads: bool) -> tuple[float, float]:
        engine = make_engine(torch.device("cuda"), horizon=horizon) if offloads else None
        for _ in range(2):
            run_stage(actions, layers, make_input, engine)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds = _seconds(lambda: run_stage(actions, layers, make_input, engine), 3)
        peak = torch.cuda.max_memory_allocated() - before
        if engine is not None:
            engine.close()
        return seconds, peak / 2**30

    forward, backward = _layer_seconds(layers[0], make_input())
    work = layer_tasks(actions, [[LayerCost(forward, backward, boundary, forward)] * _STAGE_LAYERS])
    seconds, peak = measured(None, offloads=False)
    resident = simulate_offload(work, link, Window()).peak_bytes / 2**30
    predicted = {"predicted ms": 1e3 * sum(each.seconds for each in work), "predicted boundaries GiB": resident}
    yield {"table": title, "horizon": "no offloading", "ms": 1e3 * seconds, "peak GiB": peak, **predicted}
    for horizon in (1, 2, 4, 8, None):
        seconds, peak = measured(horizon, offloads=True)
        window = auto_window(work, link, horizon)
        timeline = simulate_offload(work, link, window, rules=ON_A_GPU)
        yield {
            "table": title,
            "horizon": horizon or "auto",
            "ms": 1e3 * seconds,
            "peak GiB": peak,
            "predicted ms": 1e3 * timeline.makespan_seconds,
            "predicted boundaries GiB": timeline.peak_bytes / 2**30,
        }


def _layer_seconds(layer: Block, x: Tensor) -> tuple[float, float]:
    """Return how long a forward takes, and a backward without it."""
    forward = _seconds(lambda: layer(x), 10)
    both = _seconds(lambda: layer(x).sum().backward(), 10)
    return forward, both - forward
