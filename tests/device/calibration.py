"""What `smpkit calibrate` measures on a device whose speeds are known; the host's own work takes no time there."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

import smpkit.torch as smp
from smpkit.testing import simulated_device
from smpkit.testing.simulated_device import Speeds
from smpkit.torch import calibrate

__all__ = ["measures_what_the_device_does"]

_KERNEL = 1e-3
_SLOT = 20 * _KERNEL
_LINK = 1e9


def _work(*_: Any) -> None:
    simulated_device.sleep(_KERNEL)


def measures_what_the_device_does() -> None:
    """Measure kernels, messages, steps and the link, each of which ends long after the host has begun it."""
    simulated_device.set_policy("timed")
    simulated_device.set_speeds(Speeds(out=_LINK, back=_LINK, latency=1e-6, launch=1e-6))
    smp.init({})
    with (
        mock.patch.object(time, "perf_counter", simulated_device.now),
        mock.patch.object(calibrate, "_MIB", 1 << 14),
        mock.patch.object(calibrate, "_step", _work),
    ):
        measurement = calibrate._Measurement(0.0)
        measurement._slot = _SLOT
        model: Any = None
        inputs: Any = None
        found = {
            "a run": measurement._run(_work),
            "a step": measurement._run_step(model, inputs),
            "a run of all ranks": measurement._in_step(_work, (0,)),
        }
        assert found == pytest.approx(dict.fromkeys(found, _KERNEL), rel=0.05)
        began = simulated_device.now()
        measurement._in_step(_work, (0,))
        assert simulated_device.now() - began < 2 * _SLOT, "it makes more runs than there is time for"
        measurement._slot = 0
        link = measurement._link()
        rates = [link.out_bytes_per_second, link.back_bytes_per_second, link.both_bytes_per_second]
        assert rates == pytest.approx([_LINK, _LINK, 2 * _LINK], rel=0.05)
    simulated_device.set_speeds(Speeds())
    smp.shutdown()
