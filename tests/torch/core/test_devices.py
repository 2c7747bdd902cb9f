"""`devices`: on a CPU there is nothing to order. What it does on a GPU is tested in `tests/gpu`."""

import pytest
import torch

from smpkit.torch.core import devices

CPU = torch.device("cpu")


def test_a_cpu_has_no_streams_and_no_events() -> None:
    assert not devices.is_asynchronous(CPU)
    assert devices.current_stream(CPU) is None
    assert devices.new_stream(CPU, high_priority=True) is None
    assert devices.record_event(CPU, keeps_time=True) is None
    devices.wait_for_stream(CPU)
    with devices.on_stream(None):
        assert torch.ones(2).sum() == 2


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_accelerators_are_asynchronous(kind: str) -> None:
    assert devices.is_asynchronous(torch.device(kind))
