"""What an OffloadModel must say to a device that runs behind. The CPU, which copies at once, forgives all of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.emulated import Blocked
from smpkit.torch.offload.link import Copies, Event
from smpkit.torch.offload_model.parking import Parked, Parking
from smpkit.torch.offload_model.transfers import Traffic, Transfers
from tests.torch.offload.streams import Pending, StreamLink

_WIDTH = 4


class Behind(StreamLink):
    """Notes what came from the host, and what others were told to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Event] = []
        self.fetched: list[Event] = []
        self.settled: list[Event] = []
        self.held_back: list[Event] = []
        self.order: list[tuple[str, str, int]] = []
        """What was run, copied or waited for, and behind how much of what had been enqueued before."""

    def send(self, copies: Copies, after: Sequence[Event], what: str) -> Event:
        self.order.append(("send", what, max(map(number_of, after), default=0)))
        self.sent.append(super().send(copies, after, what))
        return self.sent[-1]

    def fetch(self, copies: Copies, after: Sequence[Event], what: str) -> Event:
        self.order.append(("fetch", what, max(map(number_of, after), default=0)))
        self.fetched.append(super().send(copies, after, what))
        return self.fetched[-1]

    def wait(self, event: Event, what: str) -> Blocked:
        self.order.append(("wait", what, number_of(event)))
        return super().wait(event, what)

    def settle(self, event: Event, what: str) -> None:
        self.settled.append(event)

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        self.held_back.append(event)


def number_of(event: Event) -> int:
    """Return how much had been enqueued with an event; 0 of one that was always complete."""
    return event._number if isinstance(event, Pending) else 0


def make() -> tuple[OffloadModel, Behind]:
    link = Behind()
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(5)]
    return OffloadModel(nn.Sequential(*layers), torch.device("cpu"), num_slices=5, links=(link, Behind())), link


def test_copies_come_behind_what_used_their_buffers() -> None:
    """Two buffers for five slices: each load and each slice's gradients take the place of another slice's."""
    link = Behind()

    class Noted(nn.Linear):
        name = ""

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            link.order.append(("run", self.name, link.count))
            return super().forward(value)

    layers = [Noted(_WIDTH, _WIDTH) for _ in range(5)]
    for index, layer in enumerate(layers):
        layer.name = f"slice {index}"
    chain = nn.Sequential(*layers)
    model = OffloadModel(chain, torch.device("cpu"), num_slices=5, checkpoint_activation=True, links=(link, Behind()))
    model(torch.randn(2, _WIDTH)).sum().backward()
    users, sent = {0: 0, 1: 0}, dict[str, int]()
    for position, (kind, what, number) in enumerate(link.order):
        index = int(what.split()[-1])
        if kind == "run":
            assert ("wait", what) in [each[:2] for each in link.order[:position]]
            users[index % 2] = number
        elif kind == "fetch":
            assert number > users[index % 2]
        elif kind == "send":
            assert number > users[index % 2]
            if index + 2 < 5:  # whose gradients were in this buffer before
                assert ("wait", f"the gradients of slice {index + 2}", sent[f"{index + 2}"]) in link.order[:position]
            sent[f"{index}"] = number_of(link.sent[len(sent)])
    assert len(sent) == 5
    assert sum(kind == "run" for kind, _, _ in link.order) == 10


def test_gradients_have_arrived_when_backward_returns() -> None:
    model, link = make()
    model(torch.randn(2, _WIDTH)).sum().backward()
    assert len(link.sent) == 5
    assert set(link.sent) <= set(link.settled)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_an_optimizer_waits_for_gradients(tied: bool, backwards: int, clip: float | None) -> None:
    """Nobody else does: they do not go to the parameters."""
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(5)]
    if tied:  # nothing else is trained, or the last slice's gradients would be waited for on its own behalf
        layers[4].weight = layers[0].weight
        for layer in layers[1:4]:
            layer.requires_grad_(False)
    link = Behind()
    chain = nn.Sequential(*layers)
    model = OffloadModel(chain, torch.device("cpu"), num_slices=5, links=(link, Behind()))
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, max_grad_norm=clip)
    for _ in range(backwards):
        model(torch.randn(2, _WIDTH)).sum().backward()
    optimizer.step()
    model.synchronize()
    assert len(link.sent) == (2 if tied else 5) * backwards
    assert set(link.sent) <= set(link.settled)


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


def test_the_weights_of_the_next_slice_come_while_one_computes() -> None:
    order: list[str] = []

    class Weights(Behind):
        def fetch(self, copies: Copies, after: Sequence[Event], what: str) -> Event:
            order.append(f"fetch {what}")
            return super().fetch(copies, after, what)

    class Noted(nn.Linear):
        number = 0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            order.append(f"run slice {self.number}")
            return super().forward(value)

    layers = [Noted(_WIDTH, _WIDTH) for _ in range(4)]
    for number, layer in enumerate(layers):
        layer.number = number
    sequence = nn.Sequential(*layers)
    model = OffloadModel(sequence, torch.device("cpu"), torch.device("cpu"), 4, True, 1, links=(Weights(), Behind()))
    output = model(torch.randn(2, _WIDTH))
    assert [each.replace(" slice", "") for each in order] == [
        *("fetch 0", "fetch 1", "run 0", "fetch 2", "run 1", "fetch 3", "run 2", "run 3")
    ]
    order.clear()
    output.sum().backward()
    assert [each.replace(" slice", "") for each in order] == [
        *("run 3", "fetch 1", "run 2", "fetch 0", "run 1", "run 0")  # the last two are there since the forward
    ]
