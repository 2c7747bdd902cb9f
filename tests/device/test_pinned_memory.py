"""Host memory that a GPU copies from and to: how it is taken, who may use it when, and what need not be waited for."""

from __future__ import annotations

import copy
import functools
import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.offload import activations
from smpkit.torch.offload.accelerator import pinned_memory
from smpkit.torch.offload.arena import LARGE_PAGE
from tests.device.device import current_stream, gpu, in_device_time, new_stream, on_stream, scaled, sleep, synchronize

_WIDTH = 256
_LONG = 1_000_000_000
"""Cycles: about half a second."""


def network(num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)])


def seconds_of(run: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


@in_device_time()
def test_large_memory_is_pinned_aligned_exact_and_copied_at_full_speed(record_property: Callable[..., None]) -> None:
    num_bytes = scaled(1 << 30, to=64) + 5000
    there = torch.empty(num_bytes, dtype=torch.uint8, device=gpu())
    made = list[tuple[Tensor, Callable[[], object]]]()
    record_property("seconds to pin 1 GiB", seconds_of(lambda: made.append(pinned_memory(there.device, num_bytes))))
    ours, release = made[0]
    torchs = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    assert ours.is_pinned()
    assert ours[-1:].is_pinned()
    assert ours.nbytes == num_bytes
    assert ours.data_ptr() % LARGE_PAGE == 0
    best = dict[tuple[str, str], float]()
    for name, here in (("ours", ours), ("torch's", torchs)):
        for way, target, source in (("out", here, there), ("back", there, here)):
            copying = functools.partial(target.copy_, source, non_blocking=True)
            runs = [seconds_of(copying) for _ in range(5)]
            best[name, way] = min(runs)
            record_property(f"GB/s {way}, {name}", num_bytes / min(runs) / 1e9)
    for way in ("out", "back"):
        assert best["ours", way] <= 1.2 * best["torch's", way]
    release()
    assert not ours.is_pinned()


def test_memory_of_an_object_that_is_gone_is_unpinned_only_after_its_copies() -> None:
    """Its copies wait behind half a second of other work; who looks at the memory then must find it pinned."""
    model = network().to(gpu())
    x = torch.randn(scaled(8192), _WIDTH, device=gpu())
    for _ in range(3):
        offload = activations(model, min_bytes=0)
        sleep(_LONG)
        with offload:
            y = model(x)
        engine = weakref.ref(offload._engine)
        del y, offload
        gc.collect()
        assert engine() is None
    synchronize()
    assert torch.equal(model(x), model(x))


@pytest.mark.also_on("sim:lazy:0")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_input_may_be_filled_anew_when_the_call_has_returned(pinned: bool, num_microbatches: int) -> None:
    plain = network()
    x = torch.randn(64, _WIDTH)
    expected = plain(x)
    expected.square().sum().backward()
    model = OffloadModel(
        copy.deepcopy(plain), gpu(), num_slices=4, checkpoint_activation=True, num_microbatches=num_microbatches
    )
    given = x.pin_memory() if pinned else x.clone()
    sleep(_LONG)
    y = model(given)
    given.numpy()[:] = float("nan")  # no version counts this
    torch.testing.assert_close(y.cpu(), expected.detach(), rtol=0, atol=1e-4)
    y.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_returns_while_the_device_is_busy(training: bool) -> None:
    model = OffloadModel(network(), gpu(), num_slices=4, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(64, _WIDTH, device=gpu())
    model(x).sum().backward()  # kernels are loaded, buffers made
    optimizer.step()
    model.synchronize()
    synchronize()
    sleep(_LONG)
    with torch.set_grad_enabled(training):
        model(x)
    assert not current_stream().query()
    model.synchronize()  # what reads the weights is over
    synchronize()


def test_an_update_leaves_the_forward_before_it_alone() -> None:
    model = OffloadModel(network(), gpu(), num_slices=4)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(64, _WIDTH, device=gpu())
    for _ in range(3):
        with torch.no_grad():
            expected = model(x).cpu()
        model(x).sum().backward()
        synchronize()
        sleep(_LONG)
        with torch.no_grad():
            y = model(x)
        optimizer.step()
        optimizer.synchronize()
        assert torch.equal(y.cpu(), expected)


def test_memory_of_a_stream_that_counts_on_the_graph_is_not_used_too_early() -> None:
    model = network().to(gpu())
    offload = activations(model, lead=1, min_bytes=0)
    side, main = new_stream(), current_stream()

    def gradients(*, offloaded: bool) -> list[Tensor]:
        model.zero_grad()
        loss = torch.zeros((), device=gpu())
        kept = list[Tensor]()
        if offloaded:
            offload.__enter__()
        for number, layer in enumerate(model):
            with on_stream(side):
                x = torch.full((scaled(4096), _WIDTH), float(number + 1), device=gpu())
            main.wait_stream(side)
            sleep(_LONG // 20)
            loss = loss + layer(x).square().mean()
            kept += [] if offloaded else [x]
            del x
            with on_stream(side):
                torch.full((scaled(4096), _WIDTH), -7.0, device=gpu())  # takes the memory at once, if it is free
        if offloaded:
            offload.__exit__(None, None, None)
        loss.backward()
        side.wait_stream(main)
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(offloaded=False)
    for _ in range(3):
        assert all(map(torch.equal, gradients(offloaded=True), expected))
    offload.close()


@pytest.mark.real_gpu("captures a graph")
def test_20_a_storage_that_was_saved_before_a_capture_is_saved_again_inside() -> None:
    model = network().to(gpu())
    offload = activations(model, min_bytes=0)
    x = torch.randn(4096, _WIDTH, device=gpu())
    weight = torch.randn(_WIDTH, _WIDTH, device=gpu(), requires_grad=True)
    with offload:
        alive = (x @ weight).square().sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), offload:
        y = x @ weight
    graph.replay()
    assert torch.equal(y, x @ weight)
    (gradient,) = torch.autograd.grad(alive, weight)
    (expected,) = torch.autograd.grad((x @ weight).square().sum(), weight)
    assert torch.equal(gradient, expected)
    offload.report()
    offload.close()


def test_13_workers_of_a_data_loader_are_forked_beside_pinned_memory() -> None:
    model = OffloadModel(network(), gpu(), num_slices=2)
    data = TensorDataset(torch.randn(64, _WIDTH))
    for _ in range(2):
        for (x,) in DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context="fork"):
            model(x).square().sum().backward()
    assert all(bool(each.isfinite().all()) for each in model.parameters())
