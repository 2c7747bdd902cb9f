"""`python -m benchmarks.memory_fit.main`: ways to train within a memory, side by side on the simulated accelerator.

Sixteen layers that save sixteen times their input, as a transformer's do, over three links. Layers only take time and
memory; everything else is each contestant's own code, with its streams, events and allocations. Python takes no time,
so the figures are the same on any machine and in each run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import smpkit
from benchmarks.activation_offload.simulated import begin
from smpkit.testing import simulated_device
from smpkit.testing.simulated_device import Speeds
from smpkit.torch.memory import Fitted
from smpkit.torch.offload import activations

__all__ = ["rows"]

INPUT: Final = 64 << 10
SAVED: Final = 16
"""Inputs' worth of what a layer saves."""
LAYERS: Final = 16
FORWARD: Final = 1e-3
LINKS: Final = {"GH200-like": 0.08, "PCIe 5": 0.7, "slow": 2.5}
"""How long the copy of an input takes, in forwards of a layer."""
_UNTIMED: Final = 1e30


class Layer(nn.Module):
    """Takes time and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Work.apply(x, self.weight)
        return y


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inner = x.new_empty((SAVED - 1) * x.numel())
        ctx.save_for_backward(x, inner, weight)
        simulated_device.sleep(FORWARD)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, _, weight = ctx.saved_tensors
        simulated_device.sleep(2 * FORWARD)
        return gradients[0] * weight, (gradients[0] * x).sum().view(1)


class Model(nn.Module):
    """Its layers, each checkpointed or not."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return x


Around = Callable[[nn.Module], AbstractContextManager[object]]


def measure(link: float, *, is_checkpointed: bool = False, around: Around | None = None, inputs: float = 0) -> Any:
    """Return the time of a step, in forwards of a layer, and the peak of activations, in inputs.

    Args:
        link: how long the copy of an input takes, in forwards.
        around: what forward runs in.
        inputs: how many `smpkit.fit` may use; 0: it has no part in this.
    """
    rate = INPUT / (link * FORWARD)
    begin(Speeds(_UNTIMED, _UNTIMED, rate, rate, latency=0.0, launch=0.0))
    fitted: Fitted | None = None
    try:
        model = Model(is_checkpointed=is_checkpointed).to("sim")
        if inputs:
            limit = torch.accelerator.memory_allocated() + inputs * INPUT
            fitted = smpkit.fit(model, device_gib=limit / 2**30, lead=2, min_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.0, foreach=False)
        context = around(model) if around is not None else contextlib.nullcontext()
        for _ in range(10):
            gc.collect()
            torch.accelerator.synchronize()
            before, began = torch.accelerator.memory_allocated(), simulated_device.now()
            torch.accelerator.reset_peak_memory_stats()
            with context:
                x = model(torch.ones(INPUT // 4, device="sim", requires_grad=True))
            x.backward(torch.ones_like(x))
            del x
            torch.accelerator.synchronize()
            seconds, peak = simulated_device.now() - began, torch.accelerator.max_memory_allocated() - before
            optimizer.step()
            optimizer.zero_grad()
        found: dict[str, Any] = {"step": seconds / FORWARD, "peak": peak / INPUT}
        if fitted is not None:
            report = fitted.report()
            counts = [list(fitted.state_dict().values()).count(word) for word in ("keep", "offload", "recompute")]
            found |= {"chosen": counts, "planned step": report.step_seconds / FORWARD}
            found |= {"planned peak": (report.device_bytes - before) / INPUT}
            fitted.remove()
        elif isinstance(context, activations):
            context.close()
    finally:
        simulated_device.configure()
    return found


def _save_on_cpu(_model: nn.Module) -> AbstractContextManager[object]:
    return save_on_cpu(pin_memory=True)


def rows() -> list[dict[str, Any]]:
    """Return a row per link and contestant."""
    contestants: dict[str, dict[str, Any]] = {
        "plain": {},
        "checkpoint": {"is_checkpointed": True},
        "save_on_cpu over checkpoint": {"is_checkpointed": True, "around": _save_on_cpu},
        "activations over checkpoint": {"is_checkpointed": True, "around": activations_of},
        **{f"smpkit.fit, {inputs} inputs": {"inputs": inputs} for inputs in (32, 64, 128, 192, 280)},
    }
    found = []
    for name, link in LINKS.items():
        for contestant, options in contestants.items():
            found.append({"link": name, "copy": link, "name": contestant, **measure(link, **options)})
    return found


def activations_of(model: nn.Module) -> AbstractContextManager[object]:
    """Return smpkit's own context, which offloads everything it is given."""
    return activations(model, lead=2, min_bytes=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    found = rows()
    if parser.parse_args().json:
        print(json.dumps(found, indent=1))
        return
    print("| link (copy / forward) | way | step, forwards | peak, inputs | kept, offloaded, recomputed | planned |")
    print("|---|---|---|---|---|---|")
    for row in found:
        chosen = ", ".join(map(str, row["chosen"])) if "chosen" in row else ""
        planned = f"{row['planned step']:.1f}, {row['planned peak']:.0f}" if "chosen" in row else ""
        link = f"{row['link']} ({row['copy']:g})"
        print(f"| {link} | {row['name']} | {row['step']:.1f} | {row['peak']:.0f} | {chosen} | {planned} |")


if __name__ == "__main__":
    main()
