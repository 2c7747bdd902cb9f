"""What offloading moved, held and cost, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from smpkit.torch.offload.link import Wait

__all__ = ["MIN_SECONDS", "OffloadReport", "OffloadStats", "Stall", "StepReport"]

_STEPS_KEPT: Final = 100
MIN_SECONDS: Final = 20e-6
"""Shorter waits are the cost of measuring."""


@dataclass(frozen=True)
class Stall:
    """Compute stood still because an activation was not back in time or, on a slow link, not out in time."""

    layer: str
    microbatch: int | None
    seconds: float


@dataclass(frozen=True)
class StepReport:
    """One step of one rank. Bytes on the device are those of offloaded storages, while offloading keeps them there."""

    step: int
    bytes_out: int
    bytes_back: int
    kept_bytes: int
    """Stayed on the device because the host memory budget was used up."""
    peak_device_bytes: int
    peak_host_bytes: int
    lead: int
    """How many layers ahead loads were issued."""
    stalls: tuple[Stall, ...]

    @property
    def stall_seconds(self) -> float:
        """All stalls together."""
        return sum(stall.seconds for stall in self.stalls)


@dataclass(frozen=True)
class OffloadReport:
    """What one rank has offloaded so far: totals over all steps, and the latest steps one by one."""

    rank: int
    num_steps: int
    bytes_out: int
    bytes_back: int
    peak_device_bytes: int
    peak_host_bytes: int
    stall_seconds: float
    steps: tuple[StepReport, ...]
    """The latest 100 at most."""

    def __str__(self) -> str:
        moved = f"{_text(self.bytes_out)} out, {_text(self.bytes_back)} back"
        held = f"{_text(self.peak_device_bytes)} on the device, {_text(self.peak_host_bytes)} on the host"
        stalled = f"stalled {1e3 * self.stall_seconds:.1f} ms"
        lines = [f"rank {self.rank}: {self.num_steps} steps, {moved}; at most {held}; {stalled}"]
        worst = sorted((stall for step in self.steps for stall in step.stalls), key=lambda each: -each.seconds)[:3]
        lines += [
            f"  {1e3 * stall.seconds:.1f} ms for `{stall.layer}`"
            + ("" if stall.microbatch is None else f", microbatch {stall.microbatch}")
            for stall in worst
        ]
        return "\n".join(lines)


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


@dataclass
class OffloadStats:
    """The engine's counters while steps run."""

    rank: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    kept_bytes: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0
    num_steps: int = 0
    _waits: list[tuple[str, int | None, Wait]] = field(default_factory=list)
    _steps: deque[StepReport] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    _totals: dict[str, float] = field(default_factory=dict)
    _freed: deque[int] = field(default_factory=deque)
    """Bytes released. Graphs die at any time in any thread: appending to a deque needs no lock."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes that offloading keeps on the device."""
        while self._freed:
            self.device_bytes -= self._freed.popleft()
        held = self.device_bytes = self.device_bytes + num_bytes
        if held > self.peak_device_bytes:  # noqa: PLR1730 - often called
            self.peak_device_bytes = held

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes; callable from destructors."""
        self._freed.append(num_bytes)

    def add_wait(self, layer: str, microbatch: int | None, wait: Wait) -> None:
        """Note that compute may have stood still."""
        self._waits.append((layer, microbatch, wait))

    @property
    def stall_seconds(self) -> float:
        """All stalls so far that the device has come to, those of the present step too."""
        return self._totals.get("stall", 0.0) + sum(each.seconds for each in _stalls(self._known()))

    def end_step(self, lead: int, peak_host_bytes: int) -> StepReport:
        """Close a step, and start the next one's counts."""
        self.hold(0)
        known = self._known()
        stalls = _stalls(known)
        report = StepReport(
            self.num_steps,
            self.bytes_out,
            self.bytes_back,
            self.kept_bytes,
            self.peak_device_bytes,
            peak_host_bytes,
            lead,
            stalls,
        )
        self._steps.append(report)
        totals = self._totals
        for name, value in (("out", report.bytes_out), ("back", report.bytes_back), ("stall", report.stall_seconds)):
            totals[name] = totals.get(name, 0) + value
        for name, value in (("device", report.peak_device_bytes), ("host", report.peak_host_bytes)):
            totals[name] = max(totals.get(name, 0), value)
        self.num_steps += 1
        # Waits that the device has not reached yet are reported with the next step.
        self._waits = [wait for wait, (_, _, seconds) in zip(self._waits, known, strict=True) if seconds is None]
        self.bytes_out = self.bytes_back = self.kept_bytes = 0
        self.peak_device_bytes = self.device_bytes
        return report

    def _known(self) -> list[tuple[str, int | None, float | None]]:
        return [(layer, microbatch, wait.seconds) for layer, microbatch, wait in self._waits]

    def report(self) -> OffloadReport:
        """Return totals over all steps, and the latest steps."""
        totals = self._totals
        return OffloadReport(
            self.rank,
            self.num_steps,
            int(totals.get("out", 0)),
            int(totals.get("back", 0)),
            int(totals.get("device", 0)),
            int(totals.get("host", 0)),
            totals.get("stall", 0.0),
            tuple(self._steps),
        )


def _stalls(known: Iterable[tuple[str, int | None, float | None]]) -> tuple[Stall, ...]:
    return tuple(Stall(layer, mb, s) for layer, mb, s in known if s is not None and s >= MIN_SECONDS)
