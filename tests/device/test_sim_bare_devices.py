"""What the runtime does where a device's module lacks what torch does not require, or its driver refuses memory.

`tests/torch/core/test_devices.py` has the same for imaginary devices; here copies, streams and random numbers run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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
from tests.device.on_sim import ORDERS, naming, on_sim
from tests.device.scenarios import run_scenario
from tests.device.scenarios.activations import loss_of, make, train_step

CPU = torch.device("cpu")


def sim() -> torch.device:
    """Return the device; its name is known only to processes that have loaded it."""
    return torch.device("sim", 0)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Take functions away from the device's module, and measure the link anew."""
    module = vars(torch.get_device_module("sim"))
    kept = {name: module.pop(name) for name in names}
    link_module._speeds.clear()
    try:
        yield
    finally:
        module.update(kept)


def instead(**functions: Any) -> contextlib.AbstractContextManager[Any]:
    """Put functions in the place of some of the device's module."""
    return mock.patch.dict(vars(torch.get_device_module("sim")), functions)


def memory_without_registration() -> None:
    """A driver that registers nothing: torch pins memory, and copies run as before."""
    with without("host_register", "host_unregister"):
        run_scenario("activations, dropout", ORDERS[2])


def memory_that_is_refused() -> None:
    """A driver that takes no memory: activations stay where they are, and the link is measured all the same."""

    def refuse(address: int, num_bytes: int) -> int:
        raise RuntimeError("too much is locked")

    model, tokens = make()
    expected = train_step(model, tokens)
    for register in (refuse, lambda address, num_bytes: 12):
        link_module._speeds.clear()
        with instead(host_register=register), mock.patch.object(link_module, "_MEASURED_BYTES", 4096):
            offload = offload_activations(model, min_bytes=0, lead=1)
            found = train_step(model, tokens)
        assert offload.report().bytes_out == 0
        offload.close()
        assert all(map(torch.equal, found, expected))
    link_module._speeds.clear()


def captures() -> None:
    """While a graph is captured nothing leaves, and a wait for a copy is refused."""
    is_capturing, moved = [False], []
    model, tokens = make()
    expected = train_step(model, tokens)
    plain = link_module.AcceleratorLink.stamp

    def stamp(link: link_module.AcceleratorLink) -> torch.Event:
        assert not is_capturing[0], "an event of a captured graph cannot be asked for, not even afterwards"
        return plain(link)

    with (
        instead(is_current_stream_capturing=lambda: is_capturing[0]),
        mock.patch.object(link_module, "_MEASURED_BYTES", 4096),
        mock.patch.object(link_module.AcceleratorLink, "stamp", stamp),
    ):
        offload = offload_activations(model, min_bytes=0)
        for captured in (False, True, False):
            model.zero_grad(set_to_none=True)
            before = offload.report().bytes_out
            alive = loss_of(model, tokens) if captured else None
            is_capturing[0] = captured
            loss = loss_of(model, tokens)
            is_capturing[0] = False
            loss.backward()
            assert torch.equal(loss.detach().cpu(), expected[0])
            moved.append(offload.report().bytes_out - before)
            del alive
        assert moved[0] == moved[1] == moved[2] > 0
        link = link_for(sim(), 5.0)
        simulated_device.sleep(10.0)
        event = link.now()
        is_capturing[0] = True
        with pytest.raises(UsageError, match=r"a test would have to wait for a copy, while a CUDA graph is captured"):
            link.synchronize(event, "a test")
        is_capturing[0] = False
        offload.close()


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


CHECKS: list[Callable[[], None]] = [
    memory_without_registration,
    memory_that_is_refused,
    captures,
    a_copy_that_does_not_end,
    memory_in_use,
    a_layer_that_computes_partly_on_the_cpu,
]


@on_sim()
def test_what_a_device_lacks_is_replaced_or_refused() -> None:
    for check in CHECKS:
        with naming(check.__name__), simulated_device.no_races("random", 1):
            check()
