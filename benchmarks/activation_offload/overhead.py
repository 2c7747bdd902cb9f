"""What hooks cost per saved tensor in Python, forward and backward: processor time, with copies of 256 bytes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.emulated import EmulatedLink
from smpkit.torch.offload.engine import ActivationEngine

__all__ = ["overhead_table"]

_TENSORS, _LAYERS, _REPEATS = 25, 40, 30
"""A dense block saves about 25 tensors."""


Around = Callable[[], AbstractContextManager[object]]


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        return (gradients[0], *(None for _ in tensors))


def overhead_table() -> list[dict[str, Any]]:
    """Return microseconds per tensor above autograd's own: medians of contestants in turns, and the least."""
    contestants: dict[str, Around] = {
        "autograd alone": contextlib.nullcontext,
        "hooks that do nothing": lambda: saved_tensors_hooks(_same, _same),
        "allocate and copy, both ways": lambda: saved_tensors_hooks(_copied, _copied),
        "smpkit, `activations`": _layer_of("offload_saved_tensors"),
        "smpkit, boundaries of checkpointed calls": _layer_of("offload_inputs"),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(_REPEATS):
        for name, around in contestants.items():
            found[name].append(_measured(around))
    columns = {name: list(zip(*times, strict=True)) for name, times in found.items()}
    base = columns.pop("autograd alone")
    return [{"name": name, **_cost(times, base)} for name, times in columns.items()]


def _cost(times: list[tuple[float, ...]], base: list[tuple[float, ...]]) -> dict[str, float]:
    found = {}
    for name, theirs, alone in zip(("pack", "unpack"), times, base, strict=True):
        found[name] = statistics.median(theirs) - statistics.median(alone)
        found[f"least {name}"] = min(theirs) - min(alone)
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(tensor)


def _layer_of(kind: str) -> Around:
    """Return the engine's scope of one layer, over a link that copies in place."""
    engine = ActivationEngine(EmulatedLink(), Arena(), lead=2)
    return lambda: getattr(engine, kind)("layer")


def _measured(around: Around) -> tuple[float, float]:
    """Return microseconds of processor time per tensor, to save and to restore."""
    layers = [[torch.empty(64) for _ in range(_TENSORS)] for _ in range(_LAYERS)]
    x = torch.zeros(1, requires_grad=True)
    start = time.process_time()
    y = x
    for tensors in layers:
        with around():
            y = _Save.apply(y, *tensors)
    middle = time.process_time()
    y.sum().backward()
    end = time.process_time()
    count = _TENSORS * _LAYERS
    return 1e6 * (middle - start) / count, 1e6 * (end - middle) / count
