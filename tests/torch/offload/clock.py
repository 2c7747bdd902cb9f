"""A link in virtual time, and layers that take such time: what an engine does can be compared with a plan exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Copies, Event, Link
from tests.torch.offload.chains import call

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
    inputs, ends = dict[int, Tensor](), dict[int, Tensor]()
    if is_planned:
        engine.follow(actions)
    for action in actions:
        microbatch = action.microbatch
        if is_planned:
            engine.begin_action(action.kind, action.segment, microbatch)
        if action.kind is Kind.BACKWARD:
            ends.pop(microbatch).sum().backward()
            expected = math.prod(2 * value_of(microbatch, layer) for layer in range(num_layers))
            gradient = inputs.pop(microbatch).grad
            assert gradient is not None
            assert gradient.tolist() == pytest.approx([expected] * ELEMENTS)
            continue
        x = inputs[microbatch] = torch.full((ELEMENTS,), value_of(microbatch, 0), requires_grad=True)
        for layer in range(num_layers):
            x = call(_Layer.apply, x, clock, engine=engine, name=f"layer {layer}")
        ends[microbatch] = x
        del x
