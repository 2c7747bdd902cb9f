"""Train a model in a process of its own; print what the plan says of the host's memory and what the system counted.

The CPU plays the device, so what lies on the device is taken off: two slices' weights and gradients. Activations are
few.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.plan.offload.model import OffloadedModel, Update, host_peak_bytes
from smpkit.torch.offload_model import model as module

TOKENS = 4


def resident_bytes(field: str) -> int:
    """Return a line of the process's status: VmRSS, what it holds, or VmHWM, the most since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def train(width: int, layers: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return planned and measured bytes."""
    gc.collect()
    before = resident_bytes("VmRSS")
    forget_peak()
    network = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    module.is_the_host = lambda device: False
    model = OffloadModel(network, "cpu", num_slices=layers // 2, checkpoint_activation=True, dtype=dtype)
    optimizer = OffloadOptimizer(model, lr=1e-3, max_grad_norm=1.0)
    for _ in range(2):
        model(torch.randn(TOKENS, width, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    model.synchronize()
    on_device = 4 * 2 * width * width * dtype.itemsize
    measured = resident_bytes("VmHWM") - before - on_device
    plan = OffloadedModel(
        layers * width * width,
        layers // 2,
        TOKENS,
        num_layers=layers,
        width=width,
        number_bytes=dtype.itemsize,
    )
    return host_peak_bytes(plan, Update.JUST_IN_TIME), measured


def main() -> None:
    torch.set_num_threads(1)
    train(512, 4, torch.bfloat16)  # compiles, imports, starts threads
    train(512, 4, torch.float32)
    width, layers, name = sys.argv[1].split(",")
    sys.stdout.write(json.dumps(train(int(width), int(layers), getattr(torch, name))))


if __name__ == "__main__":
    main()
