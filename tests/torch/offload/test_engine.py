from __future__ import annotations

import gc
import math
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch.offload
from smpkit.errors import DeadlineError, UsageError
from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.emulated import CopyEvent, EmulatedLink
from smpkit.torch.offload.engine import ActivationEngine
from smpkit.torch.offload.link import CopyBatch, Event
from tests.torch.offload.chains import (
    BOUNDARY_BYTES,
    WIDTH,
    assert_idle,
    assert_same,
    chain,
    engine_on,
    forward,
    gradients,
    inputs,
    slow,
)
from tests.torch.offload.clock import ClockLink


@pytest.mark.parametrize("lead", [1, 2, 5, 99, "auto"])
@pytest.mark.parametrize("make", [EmulatedLink, slow])
def test_gradients_are_the_same_bits_for_every_lead(lead: int, make: type[EmulatedLink]) -> None:
    layers, x, engine = chain(6, dropout=0.2), inputs(), engine_on(make(), lead=lead)
    plain = gradients(layers, x, lambda: forward(layers, x))
    for _ in range(3):
        assert_same(gradients(layers, x, lambda: forward(layers, x, engine)), plain)
        gc.collect()
        engine.end_step()
    assert_idle(engine)
    engine.close()


@pytest.mark.parametrize("lead", [1, 2, 4])
def test_one_boundary_per_layer_moves_and_no_more_than_the_lead_stays(lead: int) -> None:
    layers, engine = chain(10), engine_on(lead=lead)
    y = forward(layers, inputs(), engine)
    assert engine.stats.device_bytes == lead * BOUNDARY_BYTES
    y.sum().backward()
    del y
    gc.collect()
    step = engine.end_step()
    assert step.bytes_out == 10 * BOUNDARY_BYTES
    assert step.bytes_back == (10 - lead) * BOUNDARY_BYTES
    assert step.peak_device_bytes == (lead + 1) * BOUNDARY_BYTES
    assert step.peak_host_bytes == 10 * BOUNDARY_BYTES


def test_a_slow_link_stalls_and_says_where() -> None:
    link = ClockLink(math.inf, latency_seconds=0.03)
    layers, engine = chain(6), engine_on(link, lead=1)
    y = forward(layers, inputs(), engine)
    link.seconds += 1  # until all copies have ended, which the next group notices
    with engine.offload_inputs("tail"):
        y = (y * 1).square()
    y.sum().backward()
    stalls = engine.end_step().stalls
    assert [stall.layer for stall in stalls] == [f"layers.{number}" for number in reversed(range(5))]
    assert [stall.seconds for stall in stalls] == pytest.approx([0.03] * 5)


def test_a_lead_that_is_too_short_grows_by_itself() -> None:
    layers, engine = chain(8), engine_on(ClockLink(math.inf, latency_seconds=0.004), lead="auto")
    for _ in range(3):
        forward(layers, inputs(), engine).sum().backward()
        gc.collect()
        engine.end_step()
    assert engine.tuner.lead > 2


class Stuck(EmulatedLink):
    """Brings nothing back."""

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        return CopyEvent()


def test_a_copy_that_never_ends_names_the_layer() -> None:
    engine = ActivationEngine(Stuck(deadline_seconds=0.1), Arena(), lead=1)
    results = []
    for number in range(3):
        with engine.offload_inputs(f"layers.{number}"):
            results.append((torch.randn(WIDTH, requires_grad=True) * 1).square().sum())
    with pytest.raises(DeadlineError, match=r"`layers.0` waited 0.1 s for a copy"):
        results[0].backward()


def test_what_was_loaded_for_nothing_is_taken_back_a_step_later() -> None:
    engine = engine_on(lead=2)
    results = []
    for number in range(5):
        with engine.offload_inputs(f"layers.{number}"):
            results.append((torch.randn(WIDTH, requires_grad=True) * 1).square().sum())
    results[2].backward()  # 1 and 0 are loaded, and backward does not come
    results[2] = None  # type: ignore[call-overload]
    gc.collect()
    engine.end_step()
    assert sorted(engine._prefetched) == [0, 1]
    held = engine.stats.device_bytes
    engine.end_step()
    assert not engine._prefetched
    engine.stats.hold(0)
    assert engine.stats.device_bytes == held - 2 * 4 * WIDTH
    results[0].backward()  # loads them again
    del results
    assert_idle(engine)


class Stacked(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = chain(num_layers)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("make", [EmulatedLink, slow])
def test_activations_of_a_plain_model(make: type[EmulatedLink], debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMPKIT_OFFLOAD_DEBUG", debug)
    threads = threading.active_count()
    model, x = Stacked(6), inputs()

    def leaves() -> list[Tensor]:
        return [*model.parameters(), x]

    def train(context: smpkit.torch.offload.activations | None) -> list[Tensor | None]:
        for leaf in leaves():
            leaf.grad = None
        if context is None:
            loss = model(x).square().sum()
        else:
            with context:
                loss = model(x).square().sum()
        loss.backward()
        return [leaf.grad for leaf in leaves()]

    plain = [grad.clone() for grad in train(None) if grad is not None]
    offload = smpkit.torch.offload.activations(model, lead=2, link=make())
    for _ in range(3):
        assert_same(train(offload), plain)
    gc.collect()
    report = offload.report()
    assert [step.bytes_out for step in report.steps] == [report.steps[0].bytes_out] * 3
    assert report.bytes_back <= report.bytes_out
    if make is EmulatedLink:  # over the slow link, most is back in use before it has left
        assert report.bytes_back > 0
        assert report.peak_device_bytes < report.steps[0].bytes_out
    offload.close()
    assert threading.active_count() <= threads


def test_layers_leave_one_by_one_and_leave_no_hook_behind() -> None:
    model = Stacked(6)
    offload = smpkit.torch.offload.activations(model, lead=1)
    with offload:
        loss = model(inputs()).sum()
    assert not any(module._forward_pre_hooks for module in model.modules())
    names = [group.name for index in sorted(offload._engine._groups) if (group := offload._engine._groups[index]())]
    assert names == ["Stacked", *[f"layers.{number}" for number in range(6)]][1:]
    loss.backward()
    offload.close()


def test_activations_are_entered_once_at_a_time_and_with_a_lead_that_can_be() -> None:
    model = Stacked(1)
    offload = smpkit.torch.offload.activations(model)
    with offload, pytest.raises(UsageError, match="offloaded already"):
        offload.__enter__()
    with pytest.raises(UsageError, match="`lead` is 0"):
        smpkit.torch.offload.activations(model, lead=0)
    with pytest.raises(UsageError, match="lie on no device"):
        smpkit.torch.offload.activations(nn.GELU())


def test_weights_of_a_dense_block_stay_and_each_activation_leaves_once() -> None:
    block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    x = torch.randn(2, 32, 64, requires_grad=True)
    storages: set[int] = set()
    exclude: list[torch.UntypedStorage] = []
    own = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    expected = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal expected
        storage = tensor.untyped_storage()
        if storage._cdata not in own | storages:
            storages.add(storage._cdata)
            exclude.append(storage)
            expected += storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        block(x)
    engine = ActivationEngine(EmulatedLink(), Arena(), lead=1)
    engine.exclude(block.parameters())
    with engine.offload_saved_tensors("block"):
        y = block(x)
    assert engine.stats.bytes_out == expected
    assert engine.stats.kept_bytes == 0
    y.sum().backward()
    del y
    assert_idle(engine)
