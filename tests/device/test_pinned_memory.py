"""Host memory that a GPU copies from and to: how it is taken, who may use it when, and what need not be waited for."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smpkit import OffloadModel, OffloadOptimizer, offload_activations
from smpkit.torch.distributed.host_memory import LARGE_PAGE, pinned_bytes
from tests.device.device import current_stream, gpu, new_stream, on_stream, scaled, sleep, synchronize
from tests.device.models import Checkpointed

_WIDTH = 256
_LONG = 1_000_000_000
"""Cycles: about half a second."""


def network(num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers)])


def test_large_memory_is_pinned_aligned_and_exact(record_property: Callable[..., None]) -> None:
    num_bytes = scaled(1 << 30, to=64) + 5000
    pinned_bytes(gpu(), num_bytes)  # the first one is slower
    start = time.perf_counter()
    memory = pinned_bytes(gpu(), num_bytes)
    record_property("seconds to pin 1 GiB", time.perf_counter() - start)
    assert memory.is_pinned()
    assert memory[-1:].is_pinned()
    assert memory.nbytes == num_bytes
    assert memory.data_ptr() % LARGE_PAGE == 0


def test_memory_of_an_object_that_is_gone_is_unpinned_only_after_its_copies() -> None:
    """Its copies wait behind half a second of other work; who looks at the memory then must find it pinned."""
    model = Checkpointed(*network()).to(gpu())
    x = torch.randn(scaled(8192), _WIDTH, device=gpu())
    for _ in range(3):
        offload = offload_activations(model, min_bytes=0)
        sleep(_LONG)
        y = model(x)
        for hook in offload._hooks:  # by which the model holds it
            hook.remove()
        engine = weakref.ref(offload._engine)
        del y, offload, hook
        gc.collect()
        assert engine() is None
    synchronize()
    assert torch.equal(model(x), model(x))


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
        model.synchronize()
        assert torch.equal(y.cpu(), expected)


class Elsewhere(Checkpointed):
    """Each layer's input is memory of another stream, which takes it again at once, if it is free."""

    def forward(self, x: Tensor) -> Tensor:
        side, main = new_stream(), current_stream()
        for number, layer in enumerate(self):
            with on_stream(side):
                y = torch.full((scaled(4096), _WIDTH), float(number + 1), device=gpu())
            main.wait_stream(side)
            sleep(_LONG // 20)
            x = x + checkpoint(layer, y, use_reentrant=False).square().mean()
            del y
            with on_stream(side):
                torch.full((scaled(4096), _WIDTH), -7.0, device=gpu())
        side.wait_stream(main)
        return x


def test_memory_of_a_stream_that_counts_on_the_graph_is_not_used_too_early() -> None:
    model = Elsewhere(*network()).to(gpu())

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(torch.zeros((), device=gpu())).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    with offload_activations(model, lead=1, min_bytes=0):
        for _ in range(3):
            assert all(map(torch.equal, gradients(), expected))
