"""One rank's actions of a pipeline, run alone: forwards and backwards of checkpointed layers in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.core.offloader import KEEPING, install
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint

__all__ = ["SleepingLayer", "run_stage"]

Layer = Callable[[Tensor], Tensor]


def run_stage(
    actions: Sequence[Action],
    layers: Sequence[Layer],
    make_input: Callable[[], Tensor],
    engine: ActivationEngine | None,
    *,
    is_planned: bool = True,
) -> None:
    """Run a step; gradients of the stage's outputs are ones.

    Args:
        engine: offloads boundaries; None: they stay.
        is_planned: whether the engine is told the actions.
    """
    ends: dict[int, Tensor] = {}
    patch_torch_checkpoint()
    planned = engine if engine is not None and is_planned else KEEPING
    planned.follow(actions)
    for action in actions:
        planned.begin_action(action.kind, action.segment, action.microbatch)
        if action.kind is Kind.BACKWARD:
            end = ends.pop(action.microbatch)
            end.backward(torch.ones_like(end))
            del end
            continue
        x = make_input()
        outer = install(engine or KEEPING)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        install(outer)
        ends[action.microbatch] = x
        del x
    if engine is not None:
        engine.end_step()


@dataclass
class SleepingLayer:
    """Takes time and no processor: `seconds` forward, and twice that backward."""

    seconds: float

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.seconds)
        return y


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return 2 * gradients[0] + 0 * x, None
