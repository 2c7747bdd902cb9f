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
from smpkit.torch.offload.engine import ActivationEngine

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
    if engine is not None and is_planned:
        engine.follow(actions)
    for action in actions:
        if engine is not None and is_planned:
            engine.begin_action(action.kind, action.segment, action.microbatch)
        if action.kind is Kind.BACKWARD:
            end = ends.pop(action.microbatch)
            end.backward(torch.ones_like(end))
            del end
            continue
        x = make_input()
        for number, layer in enumerate(layers):
            if engine is None:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                with engine.offload_inputs(f"layer {number}"):
                    x = checkpoint(layer, x, use_reentrant=False)
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
