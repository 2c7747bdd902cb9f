"""A rank's part of a pipeline, run alone on layers that take time, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smpkit.plan.offload.simulate import OffloadTimeline, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.report import StepReport
from smpkit.torch.recompute.region import run_checkpointed

__all__ = ["BOUNDARY", "WORKING", "Layer", "Stage", "run_stage"]

BOUNDARY: Final = 64 << 10
"""Bytes of a layer's input."""
WORKING: Final = 4 * BOUNDARY
"""What a layer holds while it runs, forward or backward, besides the input that is its boundary."""


@dataclass(frozen=True)
class Stage:
    """The actions of a rank, its layers, and how long a layer and a copy of its input take."""

    name: str
    actions: tuple[Action, ...]
    num_layers: int
    forward_seconds: float
    copy_seconds: float
    is_pipelined: bool
    ring: int | None = 2
    """Of the simulator: 2 where the host runs ahead of the device."""

    @property
    def bytes_per_second(self) -> float:
        """Of the link, each way."""
        return BOUNDARY / self.copy_seconds

    @property
    def compute_seconds(self) -> float:
        """Of a step in which nothing waits; a backward takes two forwards, and recomputes one."""
        passes = {Kind.FORWARD: 1, Kind.BACKWARD: 3}
        return self.num_layers * self.forward_seconds * sum(passes[action.kind] for action in self.actions)

    def plan(self, lead: int | None = None, horizon: int | None = None) -> tuple[Window, OffloadTimeline]:
        """Return the window with this lead, by default the smallest without a stall, and what the plan says of it."""
        cost = LayerCost(self.forward_seconds, 2 * self.forward_seconds, BOUNDARY, self.forward_seconds)
        tasks = layer_tasks(self.actions, [[cost] * self.num_layers])
        link = LinkSpeed(self.bytes_per_second, self.bytes_per_second)
        window = auto_window(tasks, link, horizon) if lead is None else Window(lead, horizon)
        return window, simulate_offload(tasks, link, window, rules=Rules(self.is_pipelined, self.ring))


def run_stage(
    actions: Sequence[Action],
    layers: Sequence[nn.Module],
    make_input: Callable[[], Tensor],
    engine: ActivationEngine | None,
    *,
    is_planned: bool = True,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    make_output: Callable[[Tensor], Tensor] = lambda y: y,
) -> StepReport | None:
    """Run a step, and return the engine's report; gradients of the stage's outputs are ones.

    Args:
        engine: offloads boundaries; None: torch's own checkpoint keeps them.
        is_planned: whether the engine is told the actions.
        around: what each forward runs in.
    """
    outputs: dict[int, Tensor] = {}
    planned = engine if is_planned else None
    if planned is not None:
        planned.follow(actions)
    for action in actions:
        if planned is not None:
            planned.begin_action(action.kind, action.segment, action.microbatch)
        if action.kind is Kind.BACKWARD:
            y = outputs.pop(action.microbatch)
            y.backward(torch.ones_like(y))
            del y
            continue
        x = make_input()
        with around():
            for layer in layers:
                if engine is None:
                    x = checkpoint(layer, x, use_reentrant=False)
                else:
                    x = run_checkpointed(layer, [layer], (x,), {}, preserve_rng_state=True, keeper=engine)
        outputs[action.microbatch] = make_output(x)
        del x
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # waits that the device has not reached would be reported with the next step
    return None if engine is None else engine.end_step()


class Layer(nn.Module):
    """Doubles its input; takes memory, and as much time as `sleep` does: `seconds` forward, twice that backward."""

    def __init__(self, seconds: float, sleep: Callable[[float], object]) -> None:
        super().__init__()
        self.seconds, self.sleep = seconds, sleep

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        is_recomputed = torch._C._current_graph_task_id() != -1  # then the gradient of the output is there, too
        room = x.new_empty((WORKING // BOUNDARY - (2 if is_recomputed else 1)) * x.numel())
        layer.sleep(layer.seconds)
        y = 2 * x
        del room
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        room = x.new_empty((WORKING // BOUNDARY - 2) * x.numel())
        ctx.layer.sleep(2 * ctx.layer.seconds)
        gradient = 2 * gradients[0]
        del room
        return gradient, None
