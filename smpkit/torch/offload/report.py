"""What offloading moved, held and cost, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from smpkit.torch.offload.arena import Arena
from smpkit.torch.offload.link import Link

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

    link: Link
    rank: int = 0
    bytes_out: int = 0
    bytes_back: int = 0
    kept_bytes: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0
    num_steps: int = 0
    _total_out: int = 0
    _total_back: int = 0
    _total_stall: float = 0.0
    _max_device: int = 0
    _max_host: int = 0
    _waits: list[tuple[str, int | None, Any, Any]] = field(default_factory=list)
    _steps: deque[StepReport] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    _freed: deque[int] = field(default_factory=deque)
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
        return self._total_stall + sum(stall.seconds for stall in self._stalls()[0])

    def end_step(self, lead: int, arena: Arena) -> StepReport:
        """Close a step, and start the next one's counts."""
        self.hold(0)
        arena.collect()
        # Waits that the device has not reached yet are reported with the next step.
        stalls, self._waits = self._stalls()
        report = StepReport(
            self.num_steps,
            self.bytes_out,
            self.bytes_back,
            self.kept_bytes,
            self.peak_device_bytes,
            arena.peak_bytes,
            lead,
            stalls,
        )
        self._steps.append(report)
        self._total_out += report.bytes_out
        self._total_back += report.bytes_back
        self._total_stall += report.stall_seconds
        self._max_device = max(self._max_device, report.peak_device_bytes)
        self._max_host = max(self._max_host, report.peak_host_bytes)
        self.num_steps += 1
        self.bytes_out = self.bytes_back = self.kept_bytes = 0
        self.peak_device_bytes, arena.peak_bytes = self.device_bytes, arena.used_bytes
        return report

    def _stalls(self) -> tuple[tuple[Stall, ...], list[tuple[str, int | None, Any, Any]]]:
        """Return the stalls that are known, and the waits that the device has not reached."""
        stalls, unknown = list[Stall](), list[tuple[str, int | None, Any, Any]]()
        for wait in self._waits:
            layer, microbatch, first, last = wait
            if (seconds := self.link.seconds_between(first, last)) is None:
                unknown.append(wait)
            elif seconds >= MIN_SECONDS:
                stalls.append(Stall(layer, microbatch, seconds))
        return tuple(stalls), unknown

    def report(self) -> OffloadReport:
        """Return totals over all steps, and the latest steps."""
        return OffloadReport(
            self.rank,
            self.num_steps,
            self._total_out,
            self._total_back,
            self._max_device,
            self._max_host,
            self._total_stall,
            tuple(self._steps),
        )
