"""Steps on the simulated accelerator, in virtual time: what every benchmark there measures, and how.

Python takes no time there, so figures are the same on any machine and in each run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from smpkit.testing import simulated_device
from smpkit.testing.simulated_device import Span, Speeds
from smpkit.torch.offload import link

UNTIMED: Final = 1e30
"""A rate at which work takes no time."""
H200_FLOPS, H200_LINK = 430e12, 50e9
"""Operations per second in bf16, and bytes per second each way to the host."""


def begin(bytes_per_second: float = UNTIMED, flops: float = UNTIMED) -> None:
    """Measure from now on with these speeds; memory of the device and launches take no time."""
    simulated_device.load()
    simulated_device.configure(traced=True)
    simulated_device.set_speeds(Speeds(flops, UNTIMED, bytes_per_second, bytes_per_second, latency=0.0, launch=0.0))
    simulated_device.set_policy("timed")
    link._speeds.clear()  # a link measures its device once, and this one has just changed


@dataclass(frozen=True)
class Measured:
    """One step in virtual time."""

    seconds: float
    bytes_before: int
    """What was allocated on the device when it began."""
    peak_bytes: int
    """The most that was allocated, above that."""
    spans: Sequence[Span]

    def seconds_of(self, kernel: str) -> float:
        """Return how long kernels of this name took."""
        return sum(span.end - span.begin for span in self.spans if span.what == kernel)

    def overlap(self, kernel: str) -> float | None:
        """Return the part of the time of copies in which such a kernel runs; None without copies."""
        work = [(span.begin, span.end) for span in self.spans if span.what == kernel]
        copies = [(span.begin, span.end) for span in self.spans if span.what.startswith("copy to the ")]
        total = sum(end - begin for begin, end in copies)
        hidden = sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in copies for first, last in work)
        return hidden / total if total else None


def last_of(steps: int, step: Callable[[], object]) -> Measured:
    """Run so many steps, and return the last one's figures: in those before, engines learn how far ahead to load."""
    for _ in range(steps):
        gc.collect()
        torch.accelerator.synchronize()
        before, began = torch.accelerator.memory_allocated(), simulated_device.now()
        torch.accelerator.reset_peak_memory_stats()
        simulated_device.timeline()
        step()
        torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() - before
    measured = Measured(simulated_device.now() - began, before, peak, simulated_device.timeline())
    simulated_device.configure()
    return measured
