"""The largest model that a host holds is planned to within 2 %: from a quarter GiB to 2 GiB stand for more."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload.model import OffloadedModel, Update, host_peak_bytes, largest_parameters
from smpkit.torch.offload_model import model as module
from tests.ranks import run_ranks

MIB = 1 << 20
LAYERS, TOKENS = 16, 4
MALLOC = {"trim threshold": (-1, 65536), "mmap threshold": (-3, 65536), "most arenas": (-8, 1)}
"""Numbers of glibc's options and their values: what is freed goes back at once, or it would make room for the next."""
pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="asks Linux for the most memory that a process held"
)


def _resident_bytes(field: str) -> int:
    """Return a line of the process's status: VmRSS, what it holds, or VmHWM, the most since that was cleared."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _plan(width: int, layers: int, dtype: torch.dtype) -> OffloadedModel:
    count = layers * width * width
    return OffloadedModel(count, layers // 2, TOKENS, num_layers=layers, width=width, number_bytes=dtype.itemsize)


def _width(host_bytes: int, dtype: torch.dtype) -> int:
    """Return the width of the largest model of square layers for a host."""
    model = replace(_plan(1, LAYERS, dtype), num_parameters=1)
    count = largest_parameters(model, host_bytes, reserve_bytes=0, update=Update.JUST_IN_TIME)
    assert largest_parameters(replace(model, width=1024), host_bytes, 0, Update.JUST_IN_TIME) <= count
    return math.isqrt(count // LAYERS)


def _train(width: int, layers: int, dtype: torch.dtype) -> float:
    """Return the most bytes that the host held.

    The CPU plays the device, so what lies on the device is taken off: two slices' weights and gradients. Activations
    are few.
    """
    gc.collect()
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    network = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    model = OffloadModel(network, "cpu", num_slices=layers // 2, checkpoint_activation=True, dtype=dtype)
    optimizer = OffloadOptimizer(model, lr=1e-3, max_grad_norm=1.0)
    for _ in range(2):
        model(torch.randn(TOKENS, width, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    model.synchronize()
    return _resident_bytes("VmHWM") - before - 4 * 2 * width * width * dtype.itemsize


def _train_alone(width: int, dtype: torch.dtype) -> float:
    """Train in a process of its own."""
    for option, value in MALLOC.values():
        assert ctypes.CDLL(None).mallopt(option, value)
    torch.set_num_threads(1)
    module.is_the_host = lambda device: False
    for other in (torch.bfloat16, torch.float32):
        _train(512, 4, other)  # compiles, imports, starts threads
    return _train(width, LAYERS, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("host_mib", [256, 1024, 2048])
def test_the_largest_model_fills_its_host_to_two_percent(host_mib: int, dtype: torch.dtype) -> None:
    """Train it, and compare what it took with the plan and the host."""
    width = _width(host_mib * MIB, dtype)
    [measured] = run_ranks(_train_alone, 1, width, dtype, timeout=240)
    planned = host_peak_bytes(_plan(width, LAYERS, dtype), Update.JUST_IN_TIME)
    sys.stdout.write(f"planned {planned:.0f}, measured {measured:.0f}, {measured / planned:.4f}\n")
    assert measured == pytest.approx(planned, rel=0.02)
    assert measured == pytest.approx(host_mib * MIB, rel=0.02)
