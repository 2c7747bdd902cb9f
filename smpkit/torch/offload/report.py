"""What offloading moved, held and cost, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final

from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.link import Link
from smpkit.units import amount

_STEPS_KEPT: Final = 100
MIN_SECONDS: Final = 20e-6
"""Shorter waits are the cost of measuring."""
_Wait = tuple[str, int | None, Any, Any]
"""The layer and the microbatch for which compute may have waited, and time stamps before and after."""


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
        moved = f"{amount(self.bytes_out)} out, {amount(self.bytes_back)} back"
        held = f"{amount(self.peak_device_bytes)} on the device, {amount(self.peak_host_bytes)} on the host"
        stalled = f"stalled {1e3 * self.stall_seconds:.1f} ms"
        lines = [f"rank {self.rank}: {self.num_steps} steps, {moved}; at most {held}; {stalled}"]
        worst = sorted((stall for step in self.steps for stall in step.stalls), key=lambda stall: -stall.seconds)[:3]
        lines += [
            f"  {1e3 * stall.seconds:.1f} ms for `{stall.layer}`"
            + ("" if stall.microbatch is None else f", microbatch {stall.microbatch}")
            for stall in worst
        ]
        return "\n".join(lines)


class OffloadStats:
    """The engine's counters while steps run, by the clock of its link."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link = link
        self.bytes_out = self.bytes_back = self.kept_bytes = 0
        self.device_bytes = self.peak_device_bytes = 0
        self._total = OffloadReport(rank, 0, 0, 0, 0, 0, 0.0, ())
        self._waits: list[_Wait] = []
        self._steps: deque[StepReport] = deque(maxlen=_STEPS_KEPT)
        self._freed: deque[int] = deque()
        """Bytes released. Graphs die at any time in any thread: appending to a deque needs no lock."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes that offloading keeps on the device."""
        while self._freed:
            self.device_bytes -= self._freed.popleft()
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes; callable from destructors."""
        self._freed.append(num_bytes)

    def add_wait(self, layer: str, microbatch: int | None, first: Any, last: Any) -> None:
        """Note that compute may have stood still between two stamps."""
        self._waits.append((layer, microbatch, first, last))

    @property
    def stall_seconds(self) -> float:
        """All stalls so far that the device has come to, those of the present step too."""
        return self._total.stall_seconds + sum(stall.seconds for stall in self._stalls()[0])

    def end_step(self, lead: int, arena: Arena) -> StepReport:
        """Close a step, and start the next one's counts."""
        self.hold(0)
        arena.collect()
        # Waits that the device has not reached yet are reported with the next step.
        stalls, self._waits = self._stalls()
        total = self._total
        report = StepReport(
            total.num_steps,
            self.bytes_out,
            self.bytes_back,
            self.kept_bytes,
            self.peak_device_bytes,
            arena.peak_bytes,
            lead,
            stalls,
        )
        self._steps.append(report)
        self._total = replace(
            total,
            num_steps=total.num_steps + 1,
            bytes_out=total.bytes_out + report.bytes_out,
            bytes_back=total.bytes_back + report.bytes_back,
            peak_device_bytes=max(total.peak_device_bytes, report.peak_device_bytes),
            peak_host_bytes=max(total.peak_host_bytes, report.peak_host_bytes),
            stall_seconds=total.stall_seconds + report.stall_seconds,
        )
        self.bytes_out = self.bytes_back = self.kept_bytes = 0
        self.peak_device_bytes, arena.peak_bytes = self.device_bytes, arena.used_bytes
        return report

    def _stalls(self) -> tuple[tuple[Stall, ...], list[_Wait]]:
        """Return the stalls that are known, and the waits that the device has not reached."""
        stalls, unknown = list[Stall](), list[_Wait]()
        for wait in self._waits:
            layer, microbatch, first, last = wait
            if (seconds := self._link.seconds_between(first, last)) is None:
                unknown.append(wait)
            elif seconds >= MIN_SECONDS:
                stalls.append(Stall(layer, microbatch, seconds))
        return tuple(stalls), unknown

    def report(self) -> OffloadReport:
        """Return totals over all steps, and the latest steps."""
        return replace(self._total, steps=tuple(self._steps))
