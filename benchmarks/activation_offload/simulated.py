"""Checkpointed layers on the simulated accelerator, in virtual time: step, stall, overlap and peak, beside the plan.

Layers only take time and memory: a forward and a backward of a dense block of 12.25 d² parameters on an H200, and its
input scaled down to 64 KiB, with a link slowed down by as much. So copies take as long, compared with layers, as they
would there, and every contestant's own code runs, with its streams, events and allocations. Python takes no time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from smpkit.plan.offload.simulate import ON_A_GPU, ON_A_GPU_ALONE, OffloadTimeline, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.testing import simulated_device
from smpkit.testing.simulated_device import Span, Speeds
from smpkit.torch.core.offloader import KEEPING, install
from smpkit.torch.offload import link
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from smpkit.torch.recompute.torch_checkpoint import patch_torch_checkpoint

__all__ = ["BOUNDARY", "WORKING", "Layer", "Measured", "Stage", "measure", "overlap_share", "simulated_table"]

BOUNDARY: Final = 64 << 10
WORKING: Final = 4 * BOUNDARY
"""What a layer holds while it runs, forward or backward, besides the input that is its boundary."""

_FLOPS, _LINK = 430e12, 50e9
_TOKENS: Final = 32 << 10
_WIDTHS: Final = (4096, 512, 256)
_MOST_LEAD: Final = 16
_UNTIMED: Final = 1e30


@dataclass(frozen=True)
class Stage:
    """What runs: the actions of a rank, its layers, and how long a layer and a copy of its input take."""

    name: str
    actions: tuple[Action, ...]
    num_layers: int
    forward_seconds: float
    copy_seconds: float
    is_pipelined: bool

    @property
    def bytes_per_second(self) -> float:
        """Of the link, each way."""
        return BOUNDARY / self.copy_seconds

    @property
    def compute_seconds(self) -> float:
        """Of a step in which nothing waits; a backward takes two forwards, and recomputes one."""
        passes = {Kind.FORWARD: 1, Kind.BACKWARD: 3}
        return self.num_layers * self.forward_seconds * sum(passes[each.kind] for each in self.actions)

    def plan(self, lead: int | None = None, horizon: int | None = None) -> tuple[Window, OffloadTimeline]:
        """Return the window with this lead, by default the smallest without a stall, and what the plan says of it."""
        cost = LayerCost(self.forward_seconds, 2 * self.forward_seconds, BOUNDARY, self.forward_seconds)
        tasks = layer_tasks(self.actions, [[cost] * self.num_layers])
        link = LinkSpeed(self.bytes_per_second, self.bytes_per_second)
        window = auto_window(tasks, link, Window(_MOST_LEAD, horizon)) if lead is None else Window(lead, horizon)
        return window, simulate_offload(tasks, link, window, rules=self.rules)

    @property
    def rules(self) -> Rules:
        """Those of the engine on a device that runs behind the host."""
        return ON_A_GPU if self.is_pipelined else ON_A_GPU_ALONE


@dataclass(frozen=True)
class Measured:
    """One step in virtual time."""

    seconds: float
    peak_bytes: int
    """The most that was allocated on the device, above what is when a step begins."""
    stall_seconds: float | None
    """As the engine itself reports it."""
    overlap: float | None
    """The part of all copy time in which a layer runs as well; None: nothing was copied."""


class Layer:
    """Takes time and memory; doubles its input.

    Args:
        seconds: of a forward; a backward takes twice that.
        checks: takes what the gradients add up to, if it is a list.
    """

    def __init__(self, seconds: float, checks: list[float] | None = None) -> None:
        self.seconds = seconds
        self.checks = checks

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _Work.apply(x, self)
        return y


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        is_recomputed = torch._C._current_graph_task_id() != -1  # then the gradient of the output is there, too
        room = x.new_empty((WORKING // BOUNDARY - (2 if is_recomputed else 1)) * x.numel())
        simulated_device.sleep(layer.seconds)
        y = 2 * x
        del room
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        room = x.new_empty((WORKING // BOUNDARY - 2) * x.numel())
        simulated_device.sleep(2 * ctx.layer.seconds)
        gradient = 2 * gradients[0]
        del room
        if ctx.layer.checks is not None:
            ctx.layer.checks.append(float((gradients[0] * x).sum()))
        return gradient, None


class _Ends(torch.autograd.Function):
    """From nothing to an input, and from an output to nothing: what a stage is connected with takes no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_elements: int) -> Tensor:
        ctx.num_elements = x.numel()
        return torch.ones(num_elements, device=x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.ones(ctx.num_elements, device=gradients[0].device), None


Around = Callable[[], AbstractContextManager[object]]


def run_stage(stage: Stage, layers: Iterable[Layer], engine: ActivationEngine | None, around: Around) -> None:
    """Run a step; the engine's, or another way to offload what a checkpointed layer keeps."""
    layers = list(layers)
    ends: dict[int, Tensor] = {}
    leaf = torch.empty(0, device="sim", requires_grad=True)
    planned = engine if stage.is_pipelined else None
    if planned is not None:
        planned.follow(stage.actions)
    for action in stage.actions:
        if planned is not None:
            planned.begin_action(action.kind, action.segment, action.microbatch)
        if action.kind is Kind.BACKWARD:
            ends.pop(action.microbatch).backward(torch.empty(0, device="sim"))
            continue
        x: Tensor = _Ends.apply(leaf, BOUNDARY // 4)
        outer = install(engine or KEEPING)
        with around():
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
        install(outer)
        ends[action.microbatch] = _Ends.apply(x, 0)
        del x


def measure(
    stage: Stage, lead: int | None = None, horizon: int | None = None, around: Around | None = None
) -> Measured:
    """Run three steps with smpkit's engine, or with `around` in its place, and return the last one's figures."""
    begin(Speeds(_UNTIMED, _UNTIMED, stage.bytes_per_second, stage.bytes_per_second, latency=0.0, launch=0.0))
    engine = None
    if around is None:
        window, _ = stage.plan(lead, horizon)
        engine = make_engine(torch.device("sim"), lead=window.lead or "auto", horizon=horizon, min_bytes=0)
    layers = [Layer(stage.forward_seconds)] * stage.num_layers
    try:
        for _ in range(2):
            run_stage(stage, layers, engine, around or contextlib.nullcontext)
            torch.accelerator.synchronize()  # before the report: waits that the device has not reached go to the next
            if engine is not None:
                engine.end_step()
        gc.collect()
        before, began = torch.accelerator.memory_allocated(), simulated_device.now()
        torch.accelerator.reset_peak_memory_stats()
        simulated_device.timeline()
        run_stage(stage, layers, engine, around or contextlib.nullcontext)
        torch.accelerator.synchronize()
        seconds, peak = simulated_device.now() - began, torch.accelerator.max_memory_allocated() - before
        stall = None if engine is None else engine.end_step().stall_seconds
    finally:
        if engine is not None:
            engine.close()
        simulated_device.configure()
    return Measured(seconds, peak, stall, overlap_share(simulated_device.timeline(), {"sleep"}))


def begin(speeds: Speeds) -> None:
    """Measure from now on with these speeds."""
    simulated_device.load()
    patch_torch_checkpoint()
    simulated_device.configure(traced=True)
    simulated_device.set_speeds(speeds)
    simulated_device.set_policy("timed")
    link._speeds.clear()  # a link measures its device once, and this one has just changed


def overlap_share(spans: Sequence[Span], kernels: set[str]) -> float | None:
    """Return the part of the time of copies in which one of these kernels runs; None without copies."""
    work = sorted((each.begin, each.end) for each in spans if each.what in kernels)
    copies = [(each.begin, each.end) for each in spans if each.what in ("copy to the host", "copy to the device")]
    total = sum(end - begin for begin, end in copies)
    hidden = sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in copies for first, last in work)
    return hidden / total if total else None


# --- the table --------------------------------------------------------------------------------------------------------


def stages() -> list[Stage]:
    """Return what the table is about: blocks of several widths, over the link of an H200."""
    found = []
    for width in _WIDTHS:
        forward = 2 * 12.25 * width**2 * _TOKENS / _FLOPS
        copy = 2 * _TOKENS * width / _LINK
        for name, actions, num_layers in (
            ("no pipeline", one_f_one_b(1, 1).actions[0], 16),
            ("first of 8", one_f_one_b(8, 16).actions[0], 8),
        ):
            found.append(Stage(f"{name}, width {width}", actions, num_layers, forward, copy, name != "no pipeline"))
    return found


def simulated_table() -> list[dict[str, Any]]:
    """Return a row per stage and contestant."""
    contestants: dict[str, Around | None] = {
        "torch checkpoint": contextlib.nullcontext,
        "torch save_on_cpu over checkpoint": lambda: save_on_cpu(pin_memory=True),
        "smpkit over checkpoint": None,
    }
    rows = []
    for stage in stages():
        for name, around in contestants.items():
            found = measure(stage, around=around)
            row = {
                "order": stage.name,
                "copy": stage.copy_seconds / stage.forward_seconds,
                "name": name,
                "seconds": found.seconds,
                "stall": found.seconds - stage.compute_seconds,
                "overlap": found.overlap,
                "boundaries": (found.peak_bytes - WORKING) / BOUNDARY,
            }
            if around is None:
                plan = stage.plan()[1]
                row |= {"reported": found.stall_seconds, "predicted": plan.makespan_seconds - stage.compute_seconds}
                row |= {"predicted boundaries": plan.peak_bytes / BOUNDARY}
            rows.append(row)
    return rows
