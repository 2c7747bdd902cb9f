"""What an OffloadModel must say to a device that runs behind. The CPU, which copies at once, forgives all of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import nn

from smpkit import OffloadModel
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.link import Copies, Event
from smpkit.torch.offload_model.parking import Parked, Parking
from smpkit.torch.offload_model.transfers import Traffic, Transfers
from tests.torch.offload.streams import StreamLink

_WIDTH = 4


class Behind(StreamLink):
    """Notes what came from the host, and what others were told to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Event] = []
        self.fetched: list[Event] = []
        self.settled: list[Event] = []
        self.held_back: list[Event] = []

    def send(self, copies: Copies, after: Sequence[Event], what: str) -> Event:
        self.sent.append(super().send(copies, after, what))
        return self.sent[-1]

    def fetch(self, copies: Copies, after: Sequence[Event], what: str) -> Event:
        self.fetched.append(super().send(copies, after, what))
        return self.fetched[-1]

    def settle(self, event: Event, what: str) -> None:
        self.settled.append(event)

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        self.held_back.append(event)


def make() -> tuple[OffloadModel, Behind]:
    link = Behind()
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(5)]
    return OffloadModel(nn.Sequential(*layers), torch.device("cpu"), num_slices=5, links=(link, Behind())), link


@pytest.mark.parametrize("training", [False, True])
def test_weights_may_be_changed_when_forward_returns(training: bool) -> None:
    model, link = make()
    with torch.set_grad_enabled(training):
        model(torch.randn(2, _WIDTH))
    assert len(link.fetched) == 5
    assert link.settled[-1] is link.fetched[-1]


def test_weights_may_be_changed_when_backward_returns() -> None:
    """Frozen slices send no gradient whose arrival would say that their weights were read."""
    model, link = make()
    for parameter in list(model.parameters())[:6]:
        parameter.requires_grad_(False)
    model(torch.randn(2, _WIDTH, requires_grad=True)).sum().backward()
    assert len(link.fetched) > 5
    assert link.fetched[-1] in link.settled


def test_gradients_that_leave_are_not_written_over_when_others_are_trained() -> None:
    model, link = make()
    model(torch.randn(2, _WIDTH)).sum().backward()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[1] in "024")  # one of the two buffers is needed no more
    link.held_back.clear()
    model(torch.randn(2, _WIDTH)).sum().backward()
    assert set(link.held_back) & set(link.sent[:5])


def test_what_comes_back_unwanted_is_not_written_over() -> None:
    link = Behind()
    parking = Parking(torch.device("cpu"), Transfers(link, Traffic()), Arena())
    parked = Parked(torch.randn(2, _WIDTH), requires_grad=False)
    parking.send(parked, keep=False)
    parking.fetch(parked)
    parking.release(parked)
    assert parked.back in link.settled


def test_what_the_next_microbatch_needs_comes_while_one_computes() -> None:
    order: list[str] = []

    class Borders(Behind):
        def fetch(self, copies: Copies, after: Sequence[Event], what: str) -> Event:
            order.append("fetch")
            return super().fetch(copies, after, what)

    class Noted(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            order.append("run")
            return super().forward(value)

    layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), Noted(_WIDTH, _WIDTH))
    model = OffloadModel(layers, torch.device("cpu"), torch.device("cpu"), 2, True, 4, links=(Behind(), Borders()))
    ahead = ["fetch", "fetch", "run", "fetch", "run", "fetch", "run", "run"]
    output = model(torch.randn(8, _WIDTH))
    assert order == ahead
    order.clear()
    output.sum().backward()
    assert order[: len(ahead)] == ahead  # behind them come gradients, for the first slice
