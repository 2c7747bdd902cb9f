"""Steps on the simulated accelerator, in virtual time: as long as with blocks of 12.25 d² parameters on an H200.

What stands for a block and its input is small, and the device or its link is slowed down by as much. So copies take as
long, compared with layers, as they would there, and every contestant's own code runs, with its streams, events and
allocations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

import smpkit
from benchmarks.activation_offload.blocks import Decoder, gradients_of
from benchmarks.activation_offload.contestants import Around, torchs_own_checkpoint
from benchmarks.simulated import H200_FLOPS, H200_LINK, Measured, begin, last_of
from smpkit.plan.offload.simulate import OffloadTimeline, Rules, simulate_offload
from smpkit.plan.offload.work import LayerCost, LinkSpeed, Window, auto_window, layer_tasks
from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.templates import one_f_one_b
from smpkit.testing import simulated_device
from smpkit.torch.offload.engine import ActivationEngine, make_engine
from smpkit.torch.offload.report import StepReport
from smpkit.torch.recompute.region import run_checkpointed

BOUNDARY: Final = 64 << 10
"""Bytes of a layer's input."""
WORKING: Final = 4 * BOUNDARY
"""What a layer holds while it runs, forward or backward, besides the input that is its boundary."""
Row = dict[str, str]


def _block_seconds(width: int) -> tuple[float, float]:
    """Return how long a forward of 32,768 tokens takes on an H200, and a copy of the block's input in bf16."""
    tokens = 32 << 10
    return 2 * 12.25 * width**2 * tokens / H200_FLOPS, 2 * tokens * width / H200_LINK


# --- boundaries of checkpointed layers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """The actions of a rank, its layers, and how long a layer and a copy of its input take."""

    actions: tuple[Action, ...]
    num_layers: int
    forward_seconds: float
    copy_seconds: float
    is_pipelined: bool

    @property
    def bytes_per_second(self) -> float:
        """The rate of the link, each way."""
        return BOUNDARY / self.copy_seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step in which nothing waits; a backward takes two forwards, and recomputes one."""
        passes = {Kind.FORWARD: 1, Kind.BACKWARD: 3}
        return self.num_layers * self.forward_seconds * sum(passes[action.kind] for action in self.actions)

    def plan(self, lead: int | None = None, horizon: int | None = None) -> tuple[Window, OffloadTimeline]:
        """Return the window with this lead, by default the smallest without a stall, and what the plan says of it."""
        cost = LayerCost(self.forward_seconds, 2 * self.forward_seconds, BOUNDARY, self.forward_seconds)
        tasks = layer_tasks(self.actions, [[cost] * self.num_layers])
        link = LinkSpeed(self.bytes_per_second, self.bytes_per_second)
        window = auto_window(tasks, link, horizon) if lead is None else Window(lead, horizon)
        return window, simulate_offload(tasks, link, window, rules=Rules(self.is_pipelined, ring=2))


def run_stage(
    actions: Sequence[Action],
    layers: Sequence[nn.Module],
    make_input: Callable[[], Tensor],
    engine: ActivationEngine | None,
    *,
    is_planned: bool = True,
    around: Around = nullcontext,
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


class _Layer(nn.Module):
    """Doubles its input; takes memory, and time on the device: `seconds` forward, twice that backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.seconds)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(x)
        is_recomputed = torch._C._current_graph_task_id() != -1  # then the gradient of the output is there, too
        room = x.new_empty((WORKING // BOUNDARY - (2 if is_recomputed else 1)) * x.numel())
        simulated_device.sleep(seconds)
        y = 2 * x
        del room
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        room = x.new_empty((WORKING // BOUNDARY - 2) * x.numel())
        simulated_device.sleep(2 * ctx.seconds)
        gradient = 2 * gradients[0]
        del room
        return gradient, None


def measure(
    stage: Stage, lead: int | None = None, horizon: int | None = None, around: Around | None = None
) -> tuple[Measured, StepReport | None]:
    """Run three steps with smpkit's engine, or with `around` in its place; return the last one's figures and report."""
    begin(stage.bytes_per_second)
    engine = None
    if around is None:
        window, _ = stage.plan(lead, horizon)
        engine = make_engine(torch.device("sim"), lead=window.lead or "auto", horizon=horizon, min_bytes=0)
    layers = [_Layer(stage.forward_seconds)] * stage.num_layers
    leaf = torch.ones(1, device="sim", requires_grad=True)
    report: StepReport | None = None

    def step() -> None:
        nonlocal report
        report = run_stage(
            stage.actions,
            layers,
            lambda: leaf.expand(BOUNDARY // 4).clone(),
            engine,
            is_planned=stage.is_pipelined,
            around=around or nullcontext,
            make_output=lambda y: y[:0].clone(),  # takes no memory until backward
        )

    measured = last_of(3, step)
    if engine is not None:
        engine.close()
    return measured, report


def stage_rows() -> Iterator[Row]:
    """Yield a row per width, order and contestant."""
    contestants: dict[str, Around | None] = {
        "torch checkpoint": nullcontext,
        "torch save_on_cpu over checkpoint": lambda: save_on_cpu(pin_memory=True),
        "smpkit over checkpoint": None,
    }
    for width in (4096, 512, 256):
        forward, copy = _block_seconds(width)
        for order, stage in {
            "no pipeline": Stage(one_f_one_b(1, 1).actions[0], 16, forward, copy, is_pipelined=False),
            "first of 8": Stage(one_f_one_b(8, 16).actions[0], 8, forward, copy, is_pipelined=True),
        }.items():
            for name, around in contestants.items():
                (step, _), (_, plan) = measure(stage, around=around), stage.plan()
                overlap = step.overlap("sleep")
                yield {
                    "order": f"{order}, width {width}",
                    "copy / forward": f"{copy / forward:.2f}",
                    "": name,
                    "step": f"{1e3 * step.seconds:.1f} ms",
                    "stall": f"{max(0.0, 1e3 * (step.seconds - stage.compute_seconds)):.1f} ms",
                    "planned stall": "-" if around else f"{1e3 * plan.stall_seconds:.1f} ms",
                    "copies hidden": "-" if overlap is None else f"{100 * overlap:.0f} %",
                    "inputs held": f"{(step.peak_bytes - WORKING) / BOUNDARY:.0f}",
                    "planned": "-" if around else f"{plan.peak_bytes / BOUNDARY:.0f}",
                }


# --- selective checkpoints whose policy names the matrix products -----------------------------------------------------


def policy_rows() -> Iterator[Row]:
    """Yield a row per width and contestant: figures of the sixth step of 16 small blocks."""
    contestants = {
        "no checkpoint": None,  # for its gradients
        "torch, MUST_SAVE": CheckpointPolicy.MUST_SAVE,
        "torch, MUST_RECOMPUTE": CheckpointPolicy.MUST_RECOMPUTE,
        "torch, MUST_CPU_OFFLOAD": CheckpointPolicy.MUST_CPU_OFFLOAD,
        "smpkit, MUST_CPU_OFFLOAD": CheckpointPolicy.MUST_CPU_OFFLOAD,
    }
    for width in (4096, 8192):
        forward, copy = _block_seconds(width)
        torch.manual_seed(0)
        model, x = Decoder(64, 1, 16), torch.randn(1, 64, 64)
        expected: list[Tensor] = []
        for name, policy in contestants.items():
            begin(x.nbytes / copy, 2 * 12.25 * 64**2 * 64 / forward)
            model, x = model.to("sim"), x.to("sim")
            model.is_checkpointed = policy is not None
            model.context_fn = noop_context_fn if policy is None else _contexts(policy)
            offloads = name.startswith("smpkit")
            with torchs_own_checkpoint(), smpkit.offload_activations(model, min_bytes=0) if offloads else nullcontext():
                figures = _sixth_step(model, x)
            expected = expected or gradients_of(model)
            same = all(map(torch.equal, gradients_of(model), expected))
            if policy is not None:
                yield {"width": str(width), "": name, **figures, "gradients": "same bits" if same else "DIFFERENT"}


def _contexts(policy: CheckpointPolicy) -> Any:
    def choose(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return policy if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, choose)


def _sixth_step(model: Decoder, x: Tensor) -> Row:
    held = 0

    def step() -> None:
        nonlocal held
        model.zero_grad(set_to_none=True)
        before = torch.accelerator.memory_allocated()
        y = model(x)
        held = torch.accelerator.memory_allocated() - before - y.nbytes  # the caller holds that one
        y.backward(torch.ones_like(y))

    measured = last_of(6, step)
    computing = [span.end - span.begin for span in measured.spans if not span.what.startswith("copy to")]
    products = sum(span.what == "aten::mm" for span in measured.spans)
    return {
        "inputs held after forward": f"{held / x.nbytes / len(model.layers):.2f}",
        "matrix products": f"{products / len(model.layers):g}",
        "step": f"{1e3 * measured.seconds:.0f} ms",
        "stall": f"{max(0.0, 1e3 * (measured.seconds - sum(computing))):.0f} ms",
    }
