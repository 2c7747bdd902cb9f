"""What is needed next comes while something else computes, by threads that use the model's own device."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload.link import Copies, Event, Link
from smpkit.torch.offload_model import kernels, weights

CPU = torch.device("cpu")


class NotedLink(Link):
    """A link that notes what comes from the host."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self._numbers: dict[int, int] = {}
        """Of what has come, by its address on the host."""

    def fetch(self, copies: Copies, after: Iterable[Event]) -> Event:
        number = self._numbers.setdefault(copies[0][0].data_ptr(), len(self._numbers))
        self._order.append(f"fetch {number}")
        return super().fetch(copies, after)


def noted(order: list[str], number: int) -> nn.Linear:
    """Return a layer that notes when it runs, and when it runs again in backward."""

    class Noted(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            order.append(f"run {number}")
            return super().forward(value)

    return Noted(4, 4)


def test_the_weights_of_the_next_slice_come_while_one_computes() -> None:
    order: list[str] = []
    layers = nn.Sequential(*[noted(order, number) for number in range(4)])
    model = OffloadModel(layers, CPU, CPU, 4, True, 1, links=(NotedLink(order), Link()))
    output = model(torch.randn(2, 4))
    assert order == ["fetch 0", "fetch 1", "run 0", "fetch 2", "run 1", "fetch 3", "run 2", "run 3"]
    order.clear()
    output.sum().backward()
    assert order == ["run 3", "fetch 1", "run 2", "fetch 0", "run 1", "run 0"]  # the last two are there already


def test_what_the_next_microbatch_needs_comes_while_one_computes() -> None:
    order: list[str] = []
    layers = nn.Sequential(nn.Linear(4, 4), noted(order, 1))
    model = OffloadModel(layers, CPU, CPU, 2, True, 4, links=(Link(), NotedLink(order)))
    output = model(torch.randn(8, 4))
    # While the last microbatch computes, what backward needs first comes.
    assert [each.split()[0] for each in order] == ["fetch", *["fetch", "run"] * 4]
    order.clear()
    output.sum().backward()
    # Behind them come gradients, for the first slice: the first one while the last microbatch computes.
    assert [each.split()[0] for each in order[:8]] == ["fetch", "run"] * 4


def test_threads_that_ask_for_events_have_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they make a context on the first GPU, half a GiB for each other rank of the host."""
    began = dict[str, torch.device]()

    def note(device: torch.device) -> None:
        began[threading.current_thread().name.rsplit("_", 1)[0]] = device

    monkeypatch.setattr(weights, "make_current", note)
    monkeypatch.setattr(kernels, "make_current", note)
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model = OffloadModel(layers, CPU, num_slices=4, links=(Link(), Link()))
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    model.synchronize()
    assert began == {"smpkit-weights": CPU, "smpkit-update": CPU}
