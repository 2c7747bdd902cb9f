"""Large models on a GPU: seconds per step, useful FLOP/s and peak, beside what the plan predicts."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks.offload_model.worker import Decoder
from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload_model import Machine, OffloadedModel, Update, device_peak_bytes, step_time

SIZES = {"1.3 B": (2048, 52), "3 B": (3072, 53), "6.7 B": (4096, 67)}
"""Width and layers; a Decoder has 6 d² parameters."""
TOKENS = (8 * 1024, 32 * 1024, 128 * 1024)
LENGTH = 1024


def measure(name: str, num_tokens: int, machine: Machine, steps: int = 3, clip: float | None = None) -> dict[str, Any]:
    """Return measured and predicted figures of one cell."""
    width, layers = SIZES[name]
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    plain = nn.Sequential(*[Decoder(width, width // 128) for _ in range(layers)])
    microbatches = max(1, num_tokens // (8 * 1024))
    model = OffloadModel(
        plain,
        device,
        num_slices=layers,
        checkpoint_activation=True,
        num_microbatches=microbatches,
        dtype=torch.bfloat16,
    )
    optimizer = OffloadOptimizer(model, lr=1e-4, max_grad_norm=clip, overlap="backward" if clip is None else "forward")
    inputs = torch.randn(num_tokens // LENGTH, LENGTH, width, dtype=torch.bfloat16)
    seconds = []
    for _ in range(steps + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    planned = OffloadedModel(
        num_parameters, layers, num_tokens, num_microbatches=microbatches, num_layers=layers, width=width
    )
    update = Update.OVERLAPPED if clip is None else Update.JUST_IN_TIME
    return {
        "seconds": sorted(seconds[1:])[len(seconds[1:]) // 2],
        "predicted_seconds": step_time(planned, machine, update).total_seconds,
        "useful_flops_per_second": 6 * num_parameters * num_tokens / sorted(seconds[1:])[len(seconds[1:]) // 2],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "predicted_peak_bytes": device_peak_bytes(planned),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
