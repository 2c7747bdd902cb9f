"""Training steps of all contestants on a GPU, each in a process of its own: what it pins or leaks goes with it.

Without a GPU the steps have a size that proves nothing.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import smpkit
from benchmarks.activation_offload.blocks import Decoder, gradients_of, train_step
from benchmarks.activation_offload.contestants import CONTESTANTS, UNCHECKPOINTED, Absent

Row = dict[str, Any]


def rows(tokens: Sequence[int]) -> Iterator[Row]:
    """Yield a row per contestant and number of tokens, one contestant after the other."""
    for name in CONTESTANTS:
        if name == "torch save_on_cpu":  # takes 45 GB of host memory and more
            continue
        command = [sys.executable, "-m", "benchmarks.activation_offload.training", name, *map(str, tokens)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            printed, why = process.stdout, f"exit status {process.returncode}, {process.stderr.strip()[-200:]}"
        except subprocess.TimeoutExpired as late:
            printed, why = (late.stdout or b"").decode(), "not done after 300 s"
        finished = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        yield from finished
        for num_tokens in tokens[len(finished) :]:
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
