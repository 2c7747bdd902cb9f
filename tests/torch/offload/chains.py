"""Chains of checkpointed layers, trained with and without offloading; a link and layers in virtual time."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.testing import EmulatedLink
from smpkit.torch.core.offloader import KEEPING
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Copies, Event, Link
from smpkit.torch.offload.order import BackwardOrder
from smpkit.torch.recompute.region import checkpointing

WIDTH = 16
BATCH = 8
BOUNDARY_BYTES = WIDTH * BATCH * 4


def chain(num_layers: int, dropout: float = 0.0) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        for _ in range(num_layers)
    )


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def call(function: Callable[..., Any], *args: Any, engine: ActivationEngine | None, name: str = "layer") -> Any:
    """Call a checkpointed function; an engine offloads its inputs."""
    modules = [function] if isinstance(function, nn.Module) else []
    with checkpointing(function, modules, args, {}, name, engine or KEEPING):
        return function(*args)


def forward(layers: Iterable[nn.Module], x: Tensor, engine: ActivationEngine | None = None) -> Tensor:
    """Run checkpointed layers; an engine offloads what they keep."""
    x = x * 1  # not a leaf, as nothing inside a model is
    for number, layer in enumerate(layers):
        x = call(layer, x, engine=engine, name=f"layers.{number}")
    return x


def gradients(layers: nn.ModuleList, x: Tensor, run: Callable[[], Tensor]) -> list[Tensor | None]:
    """Return the gradients of everything after one pass."""
    leaves = [*layers.parameters(), x]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(2)
    run().square().sum().backward()
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def assert_same(ours: Iterable[Any], plain: Iterable[Any]) -> None:
    for left, right in zip(ours, plain, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


def allocate(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")


def engine_on(
    link: Link | None = None, budget_bytes: int | None = 1 << 20, horizon: int | None = None, **options: Any
) -> ActivationEngine:
    arena = Arena(budget_bytes, allocate)
    return ActivationEngine(link or Link(), arena, BackwardOrder(horizon), **{"lead": 2, **options})


def evict(engine: ActivationEngine) -> None:
    """Let go of what has left, as later calls do."""
    for number in range(3):
        engine.park(f"later {number}", [torch.zeros(1)])


def slow() -> EmulatedLink:
    """Return a link to which things leave while a layer runs, and from which they come back late."""
    return EmulatedLink(back_bytes_per_second=100 * BOUNDARY_BYTES, jitter_seconds=0.0005)


def assert_idle(engine: ActivationEngine) -> None:
    """Raise AssertionError if a graph, a block or a byte on the device is left."""
    gc.collect()
    engine.end_step()
    assert engine.use().parked == engine.use().offloaded == engine.footprint() == 0
    assert [len(engine._parked), len(engine._loaded), len(engine.order._waiting)] == [0, 0, 0]


ELEMENTS = 64
"""Of each layer's input."""

Copied = tuple[float, float, float]
"""A copy: the first value of what was copied, and when it began and ended."""


@dataclass(eq=False)
class _Ticket:
    link: ClockLink
    end_seconds: float
    number: int = 0

    def done(self) -> bool:
        return self.link.seconds >= self.end_seconds


class ClockLink(Link):
    """A link with virtual time: compute and waits advance it, and copies of one direction run one after the other."""

    def __init__(self, bytes_per_second: float = math.inf, latency_seconds: float = 0.0) -> None:
        self.out_bytes_per_second = self.back_bytes_per_second = bytes_per_second
        self.latency_seconds = latency_seconds
        self.seconds = 0.0
        self.outs: list[Copied] = []
        self.loads: list[Copied] = []

    def now(self) -> Event:
        return _Ticket(self, self.seconds)

    def send(self, copies: Copies, after: Iterable[Event]) -> Event:
        return self._copy(self.outs, copies, after)

    def fetch(self, copies: Copies, after: Iterable[Event]) -> Event:
        return self._copy(self.loads, copies, after)

    def _copy(self, queue: list[Copied], copies: Copies, after: Iterable[Event]) -> Event:
        ready = [event.end_seconds for event in after if isinstance(event, _Ticket)]
        start = max([self.seconds, *ready, *(copy_end for _, _, copy_end in queue[-1:])])
        end = start + self.latency_seconds + sum(source.nbytes for source, _ in copies) / self.out_bytes_per_second
        for source, target in copies:
            target.copy_(source)
        queue.append((float(copies[0][0][:4].view(torch.float32)), start, end))
        return _Ticket(self, end, len(queue))

    def wait(self, event: Event, what: str) -> None:
        assert isinstance(event, _Ticket)
        self.seconds = max(self.seconds, event.end_seconds)

    def stamp(self) -> Any:
        return self.seconds

    def seconds_between(self, first: float, last: float) -> float:
        return last - first


class _Layer(torch.autograd.Function):
    """Squares, and takes one second forward and two backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: ClockLink) -> Tensor:
        ctx.link = link
        link.seconds += 1
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.link.seconds += 2
        return 2 * x * gradients[0], None


def value_of(microbatch: int, layer: int) -> float:
    """Return the value that a layer's input has, which no other has."""
    return (1.0 + microbatch / 16) ** 2.0**layer


def run_actions(
    engine: ActivationEngine, clock: ClockLink, actions: Sequence[Action], num_layers: int, *, is_planned: bool = True
) -> None:
    """Run a rank's actions with checkpointed layers, and compare the gradients."""
    inputs, ends = dict[int, Any](), dict[int, Tensor]()
    if is_planned:
        engine.follow(actions)
    for action in actions:
        microbatch = action.microbatch
        if is_planned:
            engine.begin_action(action.kind, action.segment, microbatch)
        if action.kind is Kind.BACKWARD:
            ends.pop(microbatch).sum().backward()
            expected = math.prod(2 * value_of(microbatch, layer) for layer in range(num_layers))
            assert inputs.pop(microbatch).grad.tolist() == pytest.approx([expected] * ELEMENTS)
            continue
        x = inputs[microbatch] = torch.full((ELEMENTS,), value_of(microbatch, 0), requires_grad=True)
        for layer in range(num_layers):
            x = call(_Layer.apply, x, clock, engine=engine, name=f"layer {layer}")
        ends[microbatch] = x
        del x
