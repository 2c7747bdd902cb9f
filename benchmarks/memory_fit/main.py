"""Ways to train within a memory, side by side on the simulated accelerator.

Sixteen layers that save sixteen times their input, as a transformer's do, over three links. Layers only take time and
memory; everything else is each contestant's own code, with its streams, events and allocations.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import smpkit
from benchmarks.activation_offload.blocks import Layers
from benchmarks.activation_offload.contestants import torchs_own_checkpoint
from benchmarks.common import parser, run, table
from benchmarks.simulated import begin, last_of
from smpkit.testing import simulated_device

INPUT, SAVED, LAYERS, FORWARD = 64 << 10, 16, 16, 1e-3
"""Bytes of an input; inputs' worth of what a layer saves; layers; seconds of a forward."""


class Layer(nn.Module):
    """Takes time and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.weight)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty((SAVED - 1) * x.numel()), weight)
        simulated_device.sleep(FORWARD)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, _, weight = ctx.saved_tensors
        simulated_device.sleep(2 * FORWARD)
        return gradients[0] * weight, (gradients[0] * x).sum().view(1)


def row(copy: float, way: str, inputs: int) -> list[str]:
    """Return the tenth step in forwards of a layer, its peak in inputs without the weights, and what was planned.

    Args:
        inputs: that `smpkit.fit` may use; 0 without it.
    """
    begin(INPUT / (copy * FORWARD))
    gc.collect()  # what the last row has left would count in this one's limit
    model = Layers(Layer() for _ in range(LAYERS)).to("sim")
    model.is_checkpointed = "checkpoint" in way
    limit = torch.accelerator.memory_allocated() + inputs * INPUT
    fitted = smpkit.fit(model, device_gib=limit / 2**30, lead=2, min_bytes=0) if inputs else None
    offload = smpkit.offload_activations(model, lead=2, min_bytes=0) if "offload" in way else nullcontext()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, foreach=False)

    def step() -> None:
        with save_on_cpu(pin_memory=True) if "save_on_cpu" in way else nullcontext():
            x = model(torch.ones(INPUT // 4, device="sim", requires_grad=True))
        x.backward(torch.ones_like(x))
        del x
        optimizer.step()
        optimizer.zero_grad()

    with torchs_own_checkpoint(), offload:
        figures = last_of(10, step)
    planned = ["", ""]
    if fitted is not None:
        fit, counts = fitted.report(), Counter(fitted.state_dict().values())
        choices = ", ".join(str(counts[choice]) for choice in ("keep", "offload", "recompute"))
        peak = (fit.device_bytes - figures.bytes_before) / INPUT
        planned = [choices, f"{fit.step_seconds / FORWARD:.1f}, {peak:.0f}"]
        fitted.remove()
    return [f"{figures.seconds / FORWARD:.1f}", f"{figures.peak_bytes / INPUT:.0f}", *planned]


def ways(options: argparse.Namespace) -> tuple[str, object]:
    """Return a row per link and way."""
    links = {"GH200-like": 0.08} if options.quick else {"GH200-like": 0.08, "PCIe 5": 0.7, "slow": 2.5}
    theirs = ["plain", "checkpoint", "save_on_cpu over checkpoint", "offload_activations over checkpoint"]
    every = dict.fromkeys(theirs, 0) | {f"smpkit.fit, {inputs} inputs": inputs for inputs in (32, 64, 128, 192, 280)}
    rows = [
        [f"{link} ({copy:g})", way, *row(copy, way, inputs)]
        for (link, copy), (way, inputs) in product(links.items(), every.items())
    ]
    heads = ["link (copy / forward)", "way", "step", "peak", "kept, offloaded, recomputed", "planned"]
    return table(heads, rows), rows


if __name__ == "__main__":
    run(__file__, parser(__doc__), {"ways": ways})
