"""Training steps of one contestant, in a process of its own: what it pins or leaks is gone with it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.activation_offload.blocks import Decoder, train_step
from benchmarks.activation_offload.contestants import CONTESTANTS, Absent, Contestant, Entry
from benchmarks.activation_offload.idle import idle_of

__all__ = ["FULL", "TINY", "Sizes", "training_rows"]

Row = dict[str, Any]

_SECONDS: Final = 300.0
"""For all steps of a contestant."""


@dataclass(frozen=True)
class Sizes:
    """The model, and how it is trained."""

    width: int
    heads: int
    layers: int
    tokens: tuple[int, ...]
    most_tokens_moved: int
    """Offloading without checkpointing takes more host memory for more: 89 GB for 32768 tokens of the full sizes."""
    warm_up: int
    steps: int
    names: tuple[str, ...]
    """The contestants."""


_ALL: Final = tuple(each.name for each in CONTESTANTS)
FULL: Final = Sizes(4096, 32, 16, (8 << 10, 16 << 10, 32 << 10), 8 << 10, 2, 7, _ALL)
TINY: Final = Sizes(64, 4, 2, (32,), 32, 1, 1, ("TRL over checkpoint", "smpkit over checkpoint"))


def training_rows(sizes: Sizes) -> Iterator[Row]:
    """Yield a row per contestant and number of tokens, one contestant after the other."""
    for contestant in CONTESTANTS:
        if contestant.name in sizes.names:
            found, why = ([], contestant.why_not) if contestant.why_not else _in_a_process(contestant.name, sizes)
            yield from found
            for tokens in sizes.tokens[len(found) :]:
                yield {"table": _title(sizes, tokens), "contestant": contestant.name, "note": f"not run: {why}"}


def _in_a_process(name: str, sizes: Sizes) -> tuple[list[Row], str]:
    """Return the rows that it has got done, and why there are no more."""
    command = [sys.executable, "-m", "benchmarks.activation_offload.training", name, json.dumps(asdict(sizes))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=_ROOT)
        printed, why = done.stdout, _why(done)
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode()  # bytes, whatever was asked for
        why = f"not done after {_SECONDS:.0f} s"
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")], why


_ROOT: Final = Path(__file__).parents[2]


def _why(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}; 9 is what a machine out of memory sends"
    return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]


def _title(sizes: Sizes, tokens: int) -> str:
    return f"Training step, {sizes.layers} blocks of width {sizes.width}, {tokens} tokens"


# --- in the process of a contestant -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", choices=_ALL)
    parser.add_argument("sizes", type=json.loads)
    options = parser.parse_args()
    sizes = Sizes(**{**options.sizes, "tokens": tuple(options.sizes["tokens"])})
    contestant = next(each for each in CONTESTANTS if each.name == options.contestant)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model = Decoder(sizes.width, sizes.heads, sizes.layers).to(torch.bfloat16)
    for tokens in sizes.tokens:
        row: Row = {"table": _title(sizes, tokens), "contestant": contestant.name}
        moves_all = contestant.name != "no checkpoint" and not contestant.is_checkpointed
        if moves_all and tokens > sizes.most_tokens_moved:
            row["note"] = "not run: without checkpointing this takes 45 GB of host memory and more"
        else:
            x = torch.randn(1, tokens, sizes.width, device=device, dtype=torch.bfloat16)
            try:
                row |= _measured(contestant, model, x, sizes)
            except Absent as reason:
                row["note"] = f"not run: {reason}"
            except torch.OutOfMemoryError:
                row["note"] = "out of memory"
        print(json.dumps(row), flush=True)
        model.zero_grad(set_to_none=True)
        _give_back(device)


def _measured(contestant: Contestant, model: Decoder, x: Tensor, sizes: Sizes) -> Row:
    """Return times, memory, and whether the gradients are those of plain checkpointing."""
    model.is_checkpointed, model.before_layer = True, None
    train_step(model, x, contextlib.nullcontext)
    expected = _fingerprint(model)
    entry = contestant.enter(model)
    model.is_checkpointed, model.before_layer = contestant.is_checkpointed, entry.before_layer
    try:
        for _ in range(sizes.warm_up):
            _seconds(model, x, entry)
        row = _memory(model, x, entry) if x.is_cuda else {}
        times = [_seconds(model, x, entry) for _ in range(sizes.steps)]
        row |= {"ms": 1e3 * statistics.median(times), "least ms": 1e3 * min(times)}
        row |= _idle(model, x, entry) if x.is_cuda else {}
        if entry.report is not None:
            step = entry.report().steps[-1]
            row |= {"out GiB": step.bytes_out / 2**30, "back GiB": step.bytes_back / 2**30}
            row |= {"stall ms": 1e3 * step.stall_seconds, "pinned GiB": step.peak_host_bytes / 2**30}
        row["same gradients"] = _fingerprint(model) == expected
    finally:
        entry.close()
    return row


def _seconds(model: Decoder, x: Tensor, entry: Entry) -> float:
    """Return how long a step takes, until the device is idle."""
    _settle(x.device)
    start = time.perf_counter()
    train_step(model, x, entry.around)
    _settle(x.device)
    return time.perf_counter() - start


def _memory(model: Decoder, x: Tensor, entry: Entry) -> Row:
    _give_back(x.device)
    torch.cuda.reset_peak_memory_stats()
    _seconds(model, x, entry)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return {"peak GiB": allocated / 2**30, "reserved / allocated": reserved / allocated, "pinned GiB": pinned / 2**30}


def _idle(model: Decoder, x: Tensor, entry: Entry) -> Row:
    """Return which part of a step a copy engine does nothing although a copy is ready; nothing where none is made."""
    found = idle_of(lambda: train_step(model, x, entry.around))
    if not (found.out.copies or found.back.copies):
        return {}
    return {"link idle though asked, %": 100 * found.share}


def _fingerprint(model: Decoder) -> list[int]:
    """Return a number per gradient that other bits, or the same at other places, would change."""
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        bits = parameter.grad.view(torch.int16).flatten().long()
        found.append(int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()))
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _give_back(device: torch.device) -> None:
    """Let go of what nobody uses, on the host too: torch keeps pinned memory, rounded up to powers of two."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


if __name__ == "__main__":
    main()
