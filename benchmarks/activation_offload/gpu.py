"""What needs a GPU: its link, a stage of a pipeline, and training steps of all contestants.

Each contestant trains in a process of its own: what it pins or leaks goes with it. Without a GPU the steps have a size
that proves nothing.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import smpkit
from benchmarks.activation_offload.blocks import Block, Decoder, gradients_of, train_step
from benchmarks.activation_offload.contestants import CONTESTANTS, UNCHECKPOINTED, Absent
from benchmarks.activation_offload.stage import BOUNDARY, Stage, run_stage
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.torch.distributed.host_memory import pinned_bytes
from smpkit.torch.offload.engine import make_engine
from smpkit.torch.offload.link import link_for

__all__ = ["gpu_rows", "training_rows"]

Row = dict[str, Any]


def gpu_rows() -> Iterator[Row]:
    """Yield speeds of the link, with a bare pinned tensor and with the engine's memory and streams; then a stage."""
    if not torch.cuda.is_available():
        return
    cuda, num_bytes = torch.device("cuda"), 256 << 20
    link, there = link_for(cuda, 60.0), torch.empty(num_bytes, dtype=torch.uint8, device=cuda)
    bare, ours, now = torch.empty_like(there, device="cpu").pin_memory(), pinned_bytes(cuda, num_bytes), [link.now()]
    copies: dict[str, Callable[[], object]] = {
        "bare out": lambda: bare.copy_(there, non_blocking=True),
        "engine out": lambda: link.send([(there, ours)], now),
        "bare back": lambda: there.copy_(bare, non_blocking=True),
        "engine back": lambda: link.fetch([(ours, there)], now),
    }
    speeds = {f"{name} GB/s": 1e-9 * num_bytes / _seconds(copy, 10) for name, copy in copies.items()}
    yield {"table": "Copies of 256 MiB", **speeds}

    with cuda:
        layers = [Block(4096, 32).to(torch.bfloat16) for _ in range(8)]

    def make_input() -> Tensor:
        return torch.randn(1, 8192, 4096, device=cuda, dtype=torch.bfloat16, requires_grad=True)

    x, actions = make_input(), one_f_one_b(8, 16).actions[0]
    copy_seconds = x.nbytes / min(link.out_bytes_per_second, link.back_bytes_per_second)
    stage = Stage("", actions, 8, _seconds(lambda: layers[0](x), 10), copy_seconds, is_pipelined=True)
    for horizon in ("no offloading", 1, 4, None):
        bound = horizon if isinstance(horizon, int) else None
        engine = None if horizon == "no offloading" else make_engine(cuda, horizon=bound)
        row: Row = {"table": "First stage of 8, 16 microbatches of 8192 tokens, 8 blocks of width 4096"}
        for _ in range(3):  # the engine learns how far ahead to load
            torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated(), time.perf_counter()
            report = run_stage(actions, layers, make_input, engine)
            row |= {"horizon": horizon or "auto", "ms": 1e3 * (time.perf_counter() - start)}
            row["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        if engine is not None and report is not None:
            plan = stage.plan(horizon=bound)[1]
            row |= {"inputs held": report.peak_device_bytes / x.nbytes, "planned": plan.peak_bytes / BOUNDARY}
            row |= {"stall ms": 1e3 * report.stall_seconds, "planned stall ms": 1e3 * plan.stall_seconds}
            engine.close()
        yield row


def _seconds(run: Callable[[], object], count: int) -> float:
    """Return the time of one of `count` runs after another, until the device is idle."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


# --- training steps ---------------------------------------------------------------------------------------------------


def training_rows(tokens: Sequence[int]) -> Iterator[Row]:
    """Yield a row per contestant and number of tokens, one contestant after the other."""
    for name in CONTESTANTS:
        if name == "torch save_on_cpu":  # takes 45 GB of host memory and more
            continue
        command = [sys.executable, "-m", "benchmarks.activation_offload.gpu", name, *map(str, tokens)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            printed, why = process.stdout, f"exit status {process.returncode}, {process.stderr.strip()[-200:]}"
        except subprocess.TimeoutExpired as late:
            printed, why = (late.stdout or b"").decode(), "not done after 300 s"
        rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        yield from rows
        for num_tokens in tokens[len(rows) :]:
            yield {"table": f"Training step, {num_tokens} tokens", "contestant": name, "note": f"not run: {why}"}


def main() -> None:
    """Train the contestant that the command line names, and print a row per number of tokens."""
    name, *numbers = sys.argv[1:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width, heads, num_layers = (4096, 32, 16) if device.type == "cuda" else (64, 4, 2)
    torch.manual_seed(0)
    with device:
        model = Decoder(width, heads, num_layers).to(torch.bfloat16)
    for tokens in map(int, numbers):
        x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16)
        try:
            row = _trained(name, model, x)
        except Absent as reason:
            row = {"note": f"not run: {reason}"}
        except torch.OutOfMemoryError:
            row = {"note": "out of memory"}
        print(json.dumps({"table": f"Training step, {tokens} tokens", "contestant": name, **row}), flush=True)


def _trained(name: str, model: Decoder, x: Tensor) -> Row:
    """Return times, memory, and whether the gradients are those of plain checkpointing."""
    around: Any = nullcontext

    def step() -> float:
        start = time.perf_counter()
        train_step(model, x, around)
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def gradients() -> list[Tensor]:
        # In its fast form, attention adds up gradients in an order that changes from run to run.
        torch.use_deterministic_algorithms(True, warn_only=True)
        step()
        torch.use_deterministic_algorithms(False)
        return [gradient.cpu() for gradient in gradients_of(model)]

    model.is_checkpointed = True
    expected = gradients()
    entered = CONTESTANTS[name](model)
    offload = entered if isinstance(entered, smpkit.offload_activations) else None
    around = nullcontext if offload else entered
    model.is_checkpointed = name not in UNCHECKPOINTED
    for _ in range(2):
        step()
    row: Row = {}
    if x.is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # torch keeps pinned memory, rounded up to powers of two
        torch.cuda.reset_peak_memory_stats()
        step()
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        row = {"peak GiB": torch.cuda.max_memory_allocated() / 2**30, "pinned GiB": pinned / 2**30}
    times = [step() for _ in range(7 if x.is_cuda else 1)]
    row |= {"ms": 1e3 * statistics.median(times), "least ms": 1e3 * min(times)}
    row["same gradients"] = all(map(torch.equal, gradients(), expected))
    if offload is not None:
        report = offload.report().steps[-1]
        row |= {"out GiB": report.bytes_out / 2**30, "back GiB": report.bytes_back / 2**30}
        row |= {"stall ms": 1e3 * report.stall_seconds, "pinned GiB": report.peak_host_bytes / 2**30}
        offload.close()
    return row


if __name__ == "__main__":
    main()
