"""A link in virtual time, and layers that take such time: what an engine does can be compared with a plan exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import Copies, Event, HostLink
from tests.torch.offload.chains import call

__all__ = ["ClockLink", "Copied", "run_actions", "value_of"]


@dataclass(frozen=True)
class Copied:
    """A copy: the first value of what was copied, and when it ran."""

    value: float
    start_seconds: float
    end_seconds: float


@dataclass(eq=False)
class _Ticket:
    link: ClockLink
    end_seconds: float
    number: int = 0

    def done(self) -> bool:
        return self.link.seconds >= self.end_seconds


class ClockLink(HostLink):
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
        start = max([self.seconds, *ready, *(copied.end_seconds for copied in queue[-1:])])
        end = start + self.latency_seconds + sum(source.nbytes for source, _ in copies) / self.out_bytes_per_second
        for source, target in copies:
            target.copy_(source)
        queue.append(Copied(float(copies[0][0][:4].view(torch.float32)), start, end))
        return _Ticket(self, end, len(queue))

    def wait(self, event: Event, what: str) -> None:
        assert isinstance(event, _Ticket)
        self.seconds = max(self.seconds, event.end_seconds)

    def stamp(self) -> Any:
        return self.seconds

    def seconds_between(self, first: float, last: float) -> float:
        return last - first


class _Layer(torch.autograd.Function):
    """Doubles, and takes one second forward and two backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: ClockLink) -> Tensor:
        ctx.link = link
        link.seconds += 1
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors  # noqa: B018 - asked for, as a layer that needs them does
        ctx.link.seconds += 2
        return 2 * gradients[0], None


def value_of(microbatch: int, layer: int) -> float:
    """Return the value that a layer's input has, which no other has."""
    return 3.0**microbatch * 2.0**layer


def run_actions(
    engine: ActivationEngine,
    link: ClockLink,
    actions: Sequence[Action],
    num_layers: int,
    num_elements: int,
    *,
    is_planned: bool = True,
) -> dict[int, Tensor]:
    """Run a rank's actions with checkpointed layers; return each microbatch's gradient."""
    ends: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}
    if is_planned:
        engine.follow(actions)
    for action in actions:
        if is_planned:
            engine.begin_action(action.kind, action.segment, action.microbatch)
        if action.kind is Kind.BACKWARD:
            end = ends.pop(action.microbatch)
            end.backward(torch.ones_like(end))
            del end
            continue
        x = inputs[action.microbatch] = torch.full((num_elements,), value_of(action.microbatch, 0), requires_grad=True)
        for layer in range(num_layers):
            x = call(_Layer.apply, x, link, engine=engine, name=f"layer {layer}")
        ends[action.microbatch] = x
        del x
    return {microbatch: leaf.grad for microbatch, leaf in inputs.items() if leaf.grad is not None}
