"""Training steps of all contestants on a GPU, each in a process of its own: what it pins or leaks goes with it.

Without a GPU the steps have a size that proves nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor

import smpkit
from benchmarks.activation_offload.blocks import Decoder, gradients_of, train_step
from benchmarks.activation_offload.contestants import CONTESTANTS, PEERS, UNCHECKPOINTED
from benchmarks.ranks import on_ranks
from smpkit.testing import RankFailed

Row = dict[str, Any]


def rows(tokens: Sequence[int]) -> Iterator[Row]:
    """Yield a row per contestant and number of tokens, one contestant after the other."""
    for name, num_tokens in product(CONTESTANTS | PEERS, tokens):
        try:
            [row] = on_ranks(trained, 1, name, num_tokens, timeout=300)
        except RankFailed as error:
            row = {"note": f"not run: {str(error).strip().splitlines()[-1][:200]}"}
        yield {"tokens": num_tokens, "contestant": name, **row}


def trained(name: str, num_tokens: int) -> Row:
    """Train, and return times, memory, and whether the gradients are those of plain checkpointing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    width, heads, num_layers = (4096, 32, 16) if device.type == "cuda" else (64, 4, 2)
    torch.manual_seed(0)
    with device:
        model = Decoder(width, heads, num_layers).to(torch.bfloat16)
    x = torch.randn(1, num_tokens, width, device=device, dtype=torch.bfloat16)
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
    entered = (CONTESTANTS | PEERS)[name](model)
    offload = entered if isinstance(entered, smpkit.offload_activations) else None
    around = nullcontext if offload else entered
    model.is_checkpointed = name != UNCHECKPOINTED
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
