"""Times that the runtime measures of a device, where all times are known: those of the work, not of its launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.plan.partition.assignment import UnitCost
from smpkit.testing import simulated_device
from smpkit.testing.simulated_device import Speeds
from smpkit.torch import calibrate
from smpkit.torch.memory import fit
from smpkit.torch.memory.measure import Probe
from smpkit.torch.pipeline.pipeline import measure_times
from smpkit.torch.placement.trace import TrialStep
from tests.device.on_sim import in_virtual_time
from tests.device.scenarios.common import DEVICE, WIDTH, add, present_order
from tests.torch.steps import train_step

_FORWARD, _BACKWARD, _MESSAGE = 1e-3, 2e-3, 5e-3
"""Seconds; of a layer, and of a message between two ranks."""
_LAYERS, _MICROBATCHES = 4, 4


class _Long(torch.autograd.Function):
    """Takes time on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        simulated_device.sleep(_FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        simulated_device.sleep(_BACKWARD)
        return gradient.clone()


class Layer(nn.Module):
    """Whatever it computes, its device is busy with it for a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _Long.apply(self.linear(x))


@contextlib.contextmanager
def by_the_clock(**speeds: float) -> Iterator[None]:
    """Let devices take no time but for what sleeps, and for what is given; the host's clock is theirs."""
    simulated_device.set_speeds(Speeds(**{"latency": 1e-9, "launch": 1e-9} | speeds))
    try:
        with in_virtual_time():
            yield
    finally:
        torch.accelerator.synchronize()
        simulated_device.set_speeds(Speeds())
        simulated_device.set_policy(*present_order())


def layers(*, on: str = "cpu") -> nn.Sequential:
    """Return a model of equal layers."""
    with torch.device(on):
        torch.manual_seed(0)
        return nn.Sequential(*[Layer() for _ in range(_LAYERS)])


def units_for_a_partition() -> None:
    """Measure the forward of each unit; each runs while the host is at the next one already."""
    model = layers()
    names = [str(index) for index in range(_LAYERS)]

    def step(x: Tensor) -> None:
        model(x)

    with by_the_clock():
        found = measure_times(
            model,
            [UnitCost(name) for name in names],
            TrialStep(step, (torch.zeros(2, WIDTH),), {}),
            torch.device(DEVICE),
        )
    assert {each.name: each.flops for each in found} == pytest.approx(dict.fromkeys(names, _FORWARD), rel=0.01)


add("measured, units", units_for_a_partition, is_quick=True)


def steps_to_choose_from() -> None:
    """Measure steps whose loads are late, for `fit`: nothing of the step before belongs to them."""
    steps: list[Probe] = []
    end = Probe.end

    def noted(probe: Probe) -> None:
        end(probe)
        steps.append(probe)

    model = layers(on=DEVICE)
    x = torch.zeros(64, WIDTH, device=DEVICE)
    with by_the_clock(back=x.nbytes / (4 * _BACKWARD)), mock.patch.object(Probe, "end", noted):
        fitted = fit(model, lead=1, min_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(8):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        fitted.remove()
    computed = _LAYERS * (_FORWARD + _BACKWARD)
    assert [each.busy_seconds for each in steps] == pytest.approx([computed] * 3, rel=0.01)
    assert [each.stall_seconds for each in steps] == pytest.approx([steps[-1].stall_seconds] * 3, rel=0.01)
    assert steps[-1].stall_seconds > _BACKWARD


add("measured, steps to choose from", steps_to_choose_from, is_quick=True)


def pipeline() -> None:
    """Time actions and messages over two ranks, as the recorder does."""
    actions: list[tuple[str, int, int]] = []
    received: list[tuple[int, int]] = []

    def note_action(kind: str, _segment: int, _microbatch: int, start_ns: int, end_ns: int) -> None:
        actions.append((kind, start_ns, end_ns))

    def note_message(direction: str, _peer: int, _num_bytes: int, _tag: int, start_ns: int, end_ns: int) -> None:
        if direction == "receive":
            received.append((start_ns, end_ns))

    smp.init({"pipeline_parallel_degree": 2, "microbatches": _MICROBATCHES, "ddp": True})
    model: Any = smp.DistributedModel(layers())
    x = torch.zeros(2 * _MICROBATCHES, WIDTH)
    with by_the_clock(peer=2 * WIDTH * x.itemsize / _MESSAGE):
        for _ in range(3):
            actions.clear()
            received.clear()
            train_step(model, x)
            assert model.pipeline._executor is not None
            model.pipeline._executor.record(note_action, note_message)
        is_first = smp.pp_rank() == 0
    smp.shutdown()
    each = _LAYERS // 2
    for kind, start_ns, end_ns in actions:
        waited_ns = sum(end - start for start, end in received if start_ns <= start and end <= end_ns)
        computed = each * (_FORWARD if kind == "F" else _BACKWARD)
        assert (end_ns - start_ns - waited_ns) / 1e9 == pytest.approx(computed, rel=0.05)
    if is_first:
        # Three values are on their way to rank 1; the first gradient comes back beside them.
        assert (received[0][1] - received[0][0]) / 1e9 == pytest.approx(_MESSAGE, rel=0.05)


add("measured, a pipeline", pipeline, ranks=2)


def calibration() -> None:
    """Measure kernels, messages, steps and the link, as `smpkit calibrate`: each ends long after it was begun."""
    rate, slot = 1e9, 20 * _FORWARD

    def work(*_: Any) -> None:
        simulated_device.sleep(_FORWARD)

    smp.init({})
    with (
        by_the_clock(out=rate, back=rate, latency=1e-6, launch=1e-6),
        mock.patch.object(calibrate, "_MIB", 1 << 14),
        mock.patch.object(calibrate, "_step", work),
    ):
        measurement = calibrate._Measurement(0.0)
        measurement._slot = slot
        model: Any = None
        inputs: Any = None
        found = [
            measurement._run(work),
            measurement._run_step(model, inputs),
            measurement._in_step(work, (0,)),  # a run of all ranks
        ]
        assert found == pytest.approx([_FORWARD] * 3, rel=0.05)
        began = simulated_device.now()
        measurement._in_step(work, (0,))
        assert simulated_device.now() - began < 2 * slot, "it makes more runs than there is time for"
        measurement._slot = 0
        link = measurement._link()
        rates = [link.out_bytes_per_second, link.back_bytes_per_second, link.both_bytes_per_second]
        assert rates == pytest.approx([rate, rate, 2 * rate], rel=0.05)
    smp.shutdown()


add("calibration", calibration, is_quick=True)
