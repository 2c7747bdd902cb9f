"""How far ahead loads must be issued: learnt from how long layers and copies took."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from smpkit.errors import UsageError
from smpkit.plan.offload.lead import auto_lead
from smpkit.torch.offload.link import Link, Wait

__all__ = ["Lead", "PrefetchTuner", "check_lead"]

Lead = int | Literal["auto"]

_INITIAL_LEAD: Final = 2  # enough while a copy takes no longer than a forward
_MAX_LEAD: Final = 16


def check_lead(lead: object) -> None:
    """Raise UsageError if this is no lead."""
    if lead != "auto" and (not isinstance(lead, int) or isinstance(lead, bool) or lead < 1):
        raise UsageError(f"`lead` is {lead!r}", hint='use "auto" or a number of layers, 1 or more')


@dataclass
class _LayerTiming:
    """A layer's forward or backward, from its start to that of the next."""

    stamp: Any
    load_bytes: int
    wait: Wait | None = None


class PrefetchTuner:
    """Keeps the lead: a given one, or the smallest with which the last step would not have stalled.

    Args:
        lead: in layers; "auto" learns.
    """

    def __init__(self, link: Link, lead: Lead) -> None:
        self._link = link
        self._learns = lead == "auto"
        self.lead = _INITIAL_LEAD if lead == "auto" else lead
        self._timings: list[_LayerTiming] = []
        self._last: list[_LayerTiming] = []

    def begin_layer(self, load_bytes: int) -> None:
        """Note that a layer begins, and how many bytes it needs back."""
        if self._learns:
            self._timings.append(_LayerTiming(self._link.stamp(), load_bytes))

    def add_wait(self, wait: Wait) -> None:
        """Note that the present layer had to wait first."""
        if self._timings:
            self._timings[-1].wait = wait

    def end_step(self) -> None:
        """Learn from the step before: a device may not have finished this one."""
        timings, self._last, self._timings = self._last, self._timings, []
        if not self._link.is_stream_ordered:
            timings, self._last = self._last, []
        seconds = [self._seconds(timing, following) for timing, following in pairwise(timings)]
        if not seconds or None in seconds:
            return
        compute = [each for each in seconds if each is not None]
        loads = [self._load_seconds(timing) for timing in timings[:-1]]
        # The last piece has no end; what it needs is late if anything is, so its load counts as one more.
        needed = auto_lead([*compute, 0.0], [*loads, self._load_seconds(timings[-1])], _MAX_LEAD)
        self.lead = max(needed, self.lead - 1)

    def _seconds(self, timing: _LayerTiming, following: _LayerTiming) -> float | None:
        seconds = self._link.seconds_between(timing.stamp, following.stamp)
        stalled = 0.0 if timing.wait is None else timing.wait.seconds
        return None if seconds is None or stalled is None else max(0.0, seconds - stalled)

    def _load_seconds(self, timing: _LayerTiming) -> float:
        link = self._link
        return link.latency_seconds + timing.load_bytes / link.back_bytes_per_second if timing.load_bytes else 0.0
