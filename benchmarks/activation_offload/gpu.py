"""What needs a GPU: its constants, training steps of all contestants in turns, and a stage of a pipeline."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.activation_offload.blocks import Block, Decoder, gradients_of, train_step
from benchmarks.activation_offload.contestants import CONTESTANTS, Absent, Contestant, Entry
from benchmarks.activation_offload.stage import run_stage
from smpkit.plan.offload_simulate import Rules, peak_without_offloading, simulate_offload
from smpkit.plan.offload_work import LayerCost, LinkSpeed, Window, auto_window, work_of
from smpkit.plan.schedule import one_f_one_b
from smpkit.torch.offload.build import make_engine

__all__ = ["gpu_tables"]

_MIB: Final = 1 << 20
_WIDTH, _HEADS, _LAYERS = 4096, 32, 16
_TOKENS: Final = (8 << 10, 16 << 10, 32 << 10)
_WARM_UP, _STEPS = 3, 10
_RANKS, _MICROBATCHES, _STAGE_LAYERS, _STAGE_TOKENS = 8, 16, 8, 8 << 10
_RING: Final = 2

Row = dict[str, Any]


def gpu_tables() -> list[Row]:
    """Return the rows of all tables; nothing without a GPU."""
    if not torch.cuda.is_available():
        return [{"table": "not run", "reason": "no GPU"}]
    torch.manual_seed(0)
    constants = _constants()
    rows = [{"table": "Constants", **constants}]
    for tokens in _TOKENS:
        rows += _training(tokens)
    return rows + _pipeline(LinkSpeed(constants["out GB/s"] * 1e9, constants["back GB/s"] * 1e9))


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


# --- table A ----------------------------------------------------------------------------------------------------------


def _training(tokens: int) -> list[Row]:
    """Return a row per contestant: they take turns, step by step, and are compared with plain checkpointing."""
    model = Decoder(_WIDTH, _HEADS, _LAYERS).to("cuda", torch.bfloat16)
    x = torch.randn(1, tokens, _WIDTH, device="cuda", dtype=torch.bfloat16)
    model.is_checkpointed = True
    train_step(model, x, contextlib.nullcontext)
    expected = [each.cpu() for each in gradients_of(model)]
    rows, ready = [], []
    for contestant in CONTESTANTS:
        title = f"Training step, {_LAYERS} blocks of width {_WIDTH}, {tokens} tokens"
        row: Row = {"table": title, "contestant": contestant.name}
        rows.append(row)
        try:
            ready.append((contestant, row, _tried(contestant, model, x, row, expected)))
        except Absent as reason:
            row["note"] = f"not run: {reason}"
        except torch.OutOfMemoryError:
            row["note"] = "out of memory"
    times: dict[str, list[float]] = {contestant.name: [] for contestant, _, _ in ready}
    for _ in range(_WARM_UP + _STEPS):
        for contestant, _, entry in ready:
            times[contestant.name].append(_timed(contestant, model, x, entry))
    for contestant, row, entry in ready:
        row["ms"] = 1e3 * statistics.median(times[contestant.name][_WARM_UP:])
        entry.close()
    return rows


def _tried(contestant: Contestant, model: Decoder, x: Tensor, row: Row, expected: list[Tensor]) -> Entry:
    """Run two steps by itself: note memory, and whether the gradients are those of plain checkpointing."""
    entry = contestant.enter(model)
    _timed(contestant, model, x, entry)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _timed(contestant, model, x, entry)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    row |= {"peak GiB": allocated / 2**30, "reserved / allocated": reserved / allocated}
    row["pinned GiB"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / 2**30
    if entry.report is not None:
        step = entry.report().steps[-1]
        row |= {"out GiB": step.bytes_out / 2**30, "back GiB": step.bytes_back / 2**30}
        row |= {"stall ms": 1e3 * step.stall_seconds, "pinned GiB": step.peak_host_bytes / 2**30}
    row["same gradients"] = all(map(torch.equal, (each.cpu() for each in gradients_of(model)), expected))
    return entry


def _timed(contestant: Contestant, model: Decoder, x: Tensor, entry: Entry) -> float:
    """Return the seconds of one step."""
    model.is_checkpointed, model.before_layer = contestant.is_checkpointed, entry.before_layer
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    train_step(model, x, entry.around)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


# --- table C ----------------------------------------------------------------------------------------------------------


def _pipeline(link: LinkSpeed) -> list[Row]:
    """Return a row per horizon for the first stage of a pipeline, run alone; measured and predicted."""
    title = f"First stage of {_RANKS}, {_MICROBATCHES} microbatches of {_STAGE_TOKENS} tokens, {_STAGE_LAYERS} blocks"
    layers = [Block(_WIDTH, _HEADS).to("cuda", torch.bfloat16) for _ in range(_STAGE_LAYERS)]
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
    work = work_of(actions, [[LayerCost(forward, backward, boundary, forward)] * _STAGE_LAYERS])
    seconds, peak = measured(None, offloads=False)
    resident = peak_without_offloading(work) / 2**30
    rows: list[Row] = [{"table": title, "horizon": "no offloading", "ms": 1e3 * seconds, "peak GiB": peak}]
    rows[0] |= {"predicted ms": 1e3 * sum(each.seconds for each in work), "predicted boundaries GiB": resident}
    for horizon in (1, 2, 4, 8, None):
        seconds, peak = measured(horizon, offloads=True)
        window = auto_window(work, link, Window(horizon=horizon))
        timeline = simulate_offload(work, link, window, rules=Rules(ring=_RING))
        rows.append(
            {
                "table": title,
                "horizon": horizon or "auto",
                "ms": 1e3 * seconds,
                "peak GiB": peak,
                "predicted ms": 1e3 * timeline.makespan_seconds,
                "predicted boundaries GiB": timeline.peak_bytes / 2**30,
            }
        )
    return rows


def _layer_seconds(layer: Block, x: Tensor) -> tuple[float, float]:
    """Return how long a forward takes, and a backward without it."""
    forward = _seconds(lambda: layer(x), 10)
    both = _seconds(lambda: layer(x).sum().backward(), 10)
    return forward, both - forward
