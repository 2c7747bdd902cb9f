"""A large model on a GPU: seconds per step, useful FLOP/s and peak, beside what the plan predicts."""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product

import torch
from torch import nn

from benchmarks.common import mebibytes, table
from benchmarks.pipeline.models import Block, GPTSize
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload.model import WORKSPACE_BYTES, Machine, OffloadedModel, Update, device_peak_bytes, step_time
from smpkit.torch.core.devices import wait_for_stream

WIDTH, LAYERS = 2048, 26
"""1.3 billion parameters: a block has 12 d²."""
TOKENS = (8 << 10, 32 << 10)
LENGTH = 1024


def steps(options: argparse.Namespace) -> tuple[str, object]:
    """Return a row per number of tokens, with and without clipping."""
    heads = ["tokens", "clipped", "s/step", "planned", "TFLOP/s (6PN)", "peak", "planned", "reserved"]
    rows = []
    for tokens, clip in product([LENGTH] if options.quick else TOKENS, (None, 1.0)):
        width, layers = (128, 3) if options.quick else (WIDTH, LAYERS)
        rows.append([tokens, "no" if clip is None else "yes", *_figures(width, layers, tokens, clip)])
        print(rows[-1], flush=True)
    return table(heads, rows), rows


def _figures(width: int, layers: int, num_tokens: int, clip: float | None) -> list[str]:
    """Train on the GPU; without one on the CPU, which has no peaks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with torch.device(device):  # numbers are drawn faster there
        size = GPTSize(width=width, num_heads=width // 128)
        plain = nn.Sequential(*[Block(size) for _ in range(layers)])
    plain.cpu()
    count = max(1, num_tokens // (8 * 1024))
    model = OffloadModel(
        plain, device, num_slices=layers, checkpoint_activation=True, num_microbatches=count, dtype=torch.bfloat16
    )
    optimizer = OffloadOptimizer(model, lr=1e-4, max_grad_norm=clip, overlap="backward" if clip is None else "forward")
    inputs = torch.randn(num_tokens // LENGTH, LENGTH, width, dtype=torch.bfloat16)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        wait_for_stream(device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    planned = OffloadedModel(num_parameters, layers, num_tokens, count, num_layers=layers, width=width)
    update = Update.OVERLAPPED if clip is None else Update.JUST_IN_TIME
    return [
        f"{median:.2f}",
        f"{step_time(planned, Machine(), update).total_seconds:.2f}",
        f"{6 * num_parameters * num_tokens / median / 1e12:.0f}",
        mebibytes(torch.cuda.max_memory_allocated() if on_gpu else None),
        mebibytes(device_peak_bytes(planned) + WORKSPACE_BYTES),
        mebibytes(torch.cuda.max_memory_reserved() if on_gpu else None),
    ]
