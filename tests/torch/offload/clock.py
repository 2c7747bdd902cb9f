"""A link in virtual time, and layers that take such time: what an engine does can be compared with a plan exactly."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smpkit.plan.schedule.actions import Action
from smpkit.plan.schedule.graph import Kind
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import CopyBatch, Event

__all__ = ["ClockLink", "CopyMade", "run_actions"]


@dataclass(frozen=True)
class CopyMade:
    """A copy that was issued: of what, and when it ran."""

    what: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class _Ticket:
    link: ClockLink
    end_seconds: float

    def done(self) -> bool:
        return self.link.seconds >= self.end_seconds


@dataclass(frozen=True)
class _Waited:
    seconds: float
    stamps: None = None


class ClockLink:
    """A link with virtual time: compute and waits advance it, and copies of one direction run one after the other."""

    device = torch.device("cpu")
    is_stream_ordered = False
    min_bytes = 0

    def __init__(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        self.out_bytes_per_second = self.back_bytes_per_second = bytes_per_second
        self.latency_seconds = latency_seconds
        self.seconds = 0.0
        self.outs: list[CopyMade] = []
        self.loads: list[CopyMade] = []
        self.stalls: list[tuple[str, float]] = []

    def stream(self) -> Hashable:
        return "compute"

    def now(self, stream: Hashable = None) -> Event:
        return _Ticket(self, self.seconds)

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        return self._copy(self.outs, copies, after, what)

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        return self._copy(self.loads, copies, after, what)

    def _copy(self, queue: list[CopyMade], copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        ready = [each.end_seconds for each in after if isinstance(each, _Ticket)]
        start = max([self.seconds, *ready, *(each.end_seconds for each in queue[-1:])])
        num_bytes = sum(source.nbytes for source, _ in copies)
        end = start + self.latency_seconds + num_bytes / self.out_bytes_per_second
        for source, target in copies:
            target.copy_(source)
        queue.append(CopyMade(what, start, end))
        return _Ticket(self, end)

    def wait(self, event: Event, what: str) -> _Waited:
        assert isinstance(event, _Ticket)
        seconds = max(0.0, event.end_seconds - self.seconds)
        self.seconds += seconds
        self.stalls.append((what, seconds))
        return _Waited(seconds)

    def before_reuse(self, event: Event, stream: Hashable) -> None: ...

    def record_stream(self, data: Tensor, stream: Hashable) -> None:
        pass

    def synchronize(self, event: Event, what: str) -> None:
        self.wait(event, what)

    def stamp(self) -> float:
        return self.seconds

    def seconds_between(self, first: float, last: float) -> float:
        return last - first

    def close(self) -> None: ...


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


def run_actions(
    engine: ActivationEngine, link: ClockLink, actions: Sequence[Action], num_layers: int, num_elements: int
) -> dict[int, Tensor]:
    """Run a rank's actions with checkpointed layers; return each microbatch's gradient."""
    ends: dict[int, Tensor] = {}
    inputs: dict[int, Tensor] = {}
    engine.follow(actions)
    for action in actions:
        engine.begin_action(action.kind, action.segment, action.microbatch)
        if action.kind is Kind.BACKWARD:
            end = ends.pop(action.microbatch)
            end.backward(torch.ones_like(end))
            del end
            continue
        x = inputs[action.microbatch] = torch.full((num_elements,), 1.0, requires_grad=True)
        for layer in range(num_layers):
            with engine.offload_inputs(f"layer {layer}"):
                x = checkpoint(_Layer.apply, x, link, use_reentrant=False)
        ends[action.microbatch] = x
        del x
    return {microbatch: each.grad for microbatch, each in inputs.items() if each.grad is not None}
