"""What waits for updates that still run: kernels here end only when somebody is seen to wait for them.

Nothing depends on time: where nobody waits, the other order is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload.link import DONE
from smpkit.torch.offload_model.gradients import Landing
from smpkit.torch.offload_model.kernels import Rule, Span, tiled

SECONDS = 60.0
"""After which a test fails that would else hang."""


def make(num_slices: int) -> tuple[OffloadModel, OffloadOptimizer]:
    """Return a model whose last layer has the first one's weight, one layer a slice, and its optimizer."""
    layers = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(num_slices)])
    layers[-1].weight = layers[0].weight
    model = OffloadModel(layers, torch.device("cpu"), num_slices=num_slices)
    # A thread more than what is held up.
    return model, OffloadOptimizer(model, torch.optim.SGD, lr=0.5, num_threads=2)


@pytest.mark.usefixtures("place")
def test_a_slice_waits_for_the_update_of_the_slice_that_owns_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(4)
    workers, tied = optimizer._workers, model._engine.slices[0].weights.layout.parameters[0]
    somebody_waits, updated = Event(), Event()

    def held_up(rule: Rule, span: Span) -> None:
        assert somebody_waits.wait(SECONDS)
        tiled(rule, span)
        updated.set()

    def is_tied(span: Span) -> bool:
        return span.master.untyped_storage().data_ptr() == tied.untyped_storage().data_ptr()

    wait: Callable[[Future[None], str], None] = workers.wait

    def seen(work: Future[None], what: str) -> None:
        if work in optimizer._updates[0]:
            somebody_waits.set()
        wait(work, what)

    monkeypatch.setattr(workers, "kernel", lambda span: held_up if is_tied(span) else tiled)
    monkeypatch.setattr(workers, "wait", seen)
    before = tied.detach().clone()
    try:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        assert len(optimizer._updates[0]) == 1
        assert not updated.is_set()
        with model._engine.on_device(3, fresh=True, then=None) as weights:
            assert updated.is_set()
            assert not torch.equal(weights[0], before)
            assert torch.equal(weights[0], tied)
    finally:
        somebody_waits.set()


class Watched:
    """An update, and the event that somebody waits for it."""

    def __init__(self, update: Future[None], waits: Event) -> None:
        self.done = update.done
        self._update = update
        self._waits = waits

    def result(self, timeout: float | None = None) -> None:
        self._waits.set()
        self._update.result(timeout)


def test_an_update_waits_for_the_earlier_update_of_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(2)
    (parameter,) = model._engine.slices[0].weights.layout.parameters
    go_on = Event()
    order: list[str] = []

    def noted(rule: Rule, span: Span) -> None:
        order.append("begin")
        if len(order) > 1:
            go_on.set()
        assert go_on.wait(SECONDS)
        tiled(rule, span)
        order.append("end")

    def update() -> Any:
        optimizer.receive(Landing(0, {parameter: torch.ones(parameter.numel())}, DONE))
        optimizer.step()
        return optimizer._updates[0][-1]

    monkeypatch.setattr(optimizer._workers, "kernel", lambda _: noted)
    before = parameter.detach().clone()
    try:
        optimizer._updates[0] = [Watched(update(), go_on)]  # type: ignore[list-item]
        update().result(SECONDS)
    finally:
        go_on.set()
    assert order == ["begin", "end", "begin", "end"]
    model.synchronize()
    torch.testing.assert_close(parameter.detach(), before - 1.0)
