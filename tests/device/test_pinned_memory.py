"""Host memory that a GPU copies from and to: how it is taken, who may use it when, and what need not be waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from smpkit import OffloadModel, OffloadOptimizer
from smpkit.torch.distributed.host_memory import LARGE_PAGE, pinned_bytes
from tests.device.device import gpu, scaled, sleep
from tests.device.models import layers

_WIDTH = 256
_LONG = 1_000_000_000
"""Cycles: about half a second."""


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


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_returns_while_the_device_is_busy(training: bool) -> None:
    model = OffloadModel(layers(_WIDTH, 4), gpu(), num_slices=4, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(64, _WIDTH, device=gpu())
    model(x).sum().backward()  # kernels are loaded, buffers made
    optimizer.step()
    model.synchronize()
    torch.accelerator.synchronize()
    sleep(_LONG)
    with torch.set_grad_enabled(training):
        model(x)
    assert not torch.accelerator.current_stream().query()
    model.synchronize()  # what reads the weights is over
    torch.accelerator.synchronize()
