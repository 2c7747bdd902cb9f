"""Borders of slices on the host, and memory that goes with what held it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload_model import model as module

CPU = torch.device("cpu")
both_ways = pytest.mark.parametrize("checkpoint", [False, True], ids=["graph", "checkpoint"])
everywhere = pytest.mark.usefixtures("place")


def _layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


@both_ways
def test_where_the_device_is_the_host_nothing_is_copied(checkpoint: bool) -> None:
    model = OffloadModel(_layers(), CPU, CPU, 3, checkpoint, 4)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
    for parameter in model.parameters():  # autograd's own, not parts of something larger
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes
    assert model._engine._weights == [None] * 3


def test_borders_that_do_not_fit_the_budget_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_the_host", lambda _: False)
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    model = OffloadModel(layers, CPU, num_slices=4, checkpoint_activation=True, host_budget_bytes=4096)
    model(torch.randn(16, 64)).square().sum().backward()  # 4 KiB: one border fits, four are kept
    keeper: Any = model._keeper
    assert keeper.stats.bytes_out == 4096
    assert all(parameter.grad is not None for parameter in model.parameters())


class Marker:
    latest: weakref.ref[Any]


class Marked(torch.autograd.Function):
    """Saves something that tells when its graph is gone."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.marker = marker = Marker()
        Marker.latest = weakref.ref(marker)
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@everywhere
@both_ways
@pytest.mark.parametrize("backward", [False, True])
def test_what_a_forward_kept_goes_with_its_output(checkpoint: bool, backward: bool) -> None:
    """Not when Python looks for cycles: an output such as a language model's scores is large."""

    class Marks(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return Marked.apply(super().forward(value))

    model = OffloadModel(nn.Sequential(*[Marks(4, 4) for _ in range(3)]), CPU, checkpoint_activation=checkpoint)
    gc.collect()
    gc.disable()
    try:
        output = model(torch.randn(3, 4))
        kept = Marker.latest
        assert kept() is not None
        if backward:
            output.sum().backward()
        del output
        assert kept() is None
    finally:
        gc.enable()


@everywhere
def test_a_deleted_model_leaves_no_memory_and_no_threads() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("smpkit") for thread in threading.enumerate())

    def train() -> list[weakref.ref[Any]]:
        model = OffloadModel(_layers(), CPU, checkpoint_activation=True, dtype=torch.bfloat16)
        optimizer = OffloadOptimizer(model, max_grad_norm=1.0, num_threads=2)
        for _ in range(2):
            model(torch.randn(3, 4, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
        model.synchronize()
        assert threads() > 0
        return [weakref.ref(each) for each in (model, optimizer, model._engine, model._engine.slices[0].masters[0])]

    train()  # torch's first optimizer imports its compiler
    gc.collect()
    before = threads()
    gc.disable()
    try:
        kept = train()
        assert [each() for each in kept] == [None] * 4
    finally:
        gc.enable()
    deadline = time.monotonic() + 60  # the threads end when they next look
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before
