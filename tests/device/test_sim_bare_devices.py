"""What the runtime does where a driver refuses memory, a copy never ends, or a layer is partly on another device.

What modules and drivers of devices lack is in `tests/torch/core/test_devices.py`, for imaginary devices.
"""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel, offload_activations
from smpkit.errors import DeadlineError, UsageError
from smpkit.testing import simulated_device
from smpkit.torch.core import devices
from smpkit.torch.offload import link as link_module
from smpkit.torch.offload.link import link_for
from tests.device.on_sim import naming, on_sim
from tests.device.scenarios.activations import make, train_step

CPU = torch.device("cpu")


def sim() -> torch.device:
    """Return the device; its name is known only to processes that have loaded it."""
    return torch.device("sim", 0)


def memory_that_is_refused() -> None:
    """A driver that takes no memory: activations stay where they are, and the link is measured all the same."""
    model, tokens = make()
    expected = train_step(model, tokens)
    link_module._speeds.clear()
    with (
        mock.patch.dict(vars(torch.get_device_module("sim")), host_register=lambda address, num_bytes: 12),
        mock.patch.object(link_module, "_MEASURED_BYTES", 4096),
        offload_activations(model, min_bytes=0, lead=1) as offload,
    ):
        found = train_step(model, tokens)
        assert offload.report().bytes_out == 0
    assert all(map(torch.equal, found, expected))
    link_module._speeds.clear()


def a_copy_that_does_not_end() -> None:
    """A wait of the host ends, and says what has waited."""
    link = link_for(sim(), 0.2)
    simulated_device.set_policy("timed")
    simulated_device.sleep(1e9)
    with pytest.raises(DeadlineError, match=r"a test waited 0\.2 s for a copy between device and host memory"):
        link.synchronize(link.now(), "a test")
    torch.accelerator.synchronize()


def memory_in_use() -> None:
    """What reports name."""
    before = devices.memory_bytes(sim())
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=sim())
    assert devices.memory_bytes(sim()) == before + kept.nbytes


class Late(torch.autograd.Function):
    """Lies on the CPU, where backward waits until the slice before has had its turn."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, turn: threading.Event) -> Tensor:
        ctx.turn = turn
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        assert ctx.turn.wait(60)
        return gradient, None


class PartlyOnTheCpu(nn.Module):
    def __init__(self, turn: threading.Event) -> None:
        super().__init__()
        self.weight, self.turn = nn.Parameter(torch.ones(4)), turn

    def forward(self, x: Tensor) -> Tensor:
        return x * Late.apply(self.weight.to(CPU), self.turn).to(x.device)


def a_layer_that_computes_partly_on_the_cpu() -> None:
    """Autograd runs nodes of two devices in two threads, and keeps no order between them."""
    turn = threading.Event()
    model = OffloadModel([nn.Linear(4, 4), PartlyOnTheCpu(turn)], sim())
    x = torch.ones(2, 4, device=sim(), requires_grad=True)
    x.register_hook(lambda _: turn.set())
    with pytest.raises(UsageError, match="got its gradient when its slice was not on the device"):
        model(x).sum().backward()
    torch.accelerator.synchronize()


CHECKS = [memory_that_is_refused, a_copy_that_does_not_end, memory_in_use, a_layer_that_computes_partly_on_the_cpu]


@on_sim()
def test_what_a_device_lacks_is_replaced_or_refused() -> None:
    for check in CHECKS:
        with naming(check.__name__), simulated_device.no_races("random", 1):
            check()
