"""What a profile shows of kernels and copies: how long each kind ran, and how much of the copies ran beside kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from smpkit.testing import simulated_device
from tests.device.device import IS_SIMULATED, synchronize

__all__ = ["Overlap", "overlap_in", "overlap_of"]

Interval = tuple[float, float]
_LONGEST = 12


@dataclass(frozen=True)
class Overlap:
    """Microseconds of a profiled piece of work on the device."""

    kernels: float
    out: float
    """Copies to the host."""
    back: float
    hidden_out: float
    """Of these, while a kernel ran."""
    hidden_back: float
    span: float
    """From the first to the last."""
    page: str
    """All of it as a table, to be read."""

    @property
    def share(self) -> float:
        """Which part of the copies' time kernels ran beside."""
        copies = self.out + self.back
        return (self.hidden_out + self.hidden_back) / copies if copies else 1.0


def overlap_of(work: Callable[[], object]) -> Overlap:
    """Profile a piece of work until the device is idle."""
    synchronize()
    if IS_SIMULATED:
        return overlap_in(_simulated_events(work))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        work()
        synchronize()
    events = profiler.events()
    assert events is not None
    there = [each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    return overlap_in([(each.name, each.time_range.start, each.time_range.end) for each in there])


def _simulated_events(work: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Return what the simulated device does, named as the profiler names it."""
    names = {"copy to the host": "Memcpy DtoH", "copy to the device": "Memcpy HtoD"}
    simulated_device.configure(traced=True)
    simulated_device.timeline()
    work()
    synchronize()
    found = simulated_device.timeline()
    simulated_device.configure()
    return [(names.get(each.what, each.what), each.begin * 1e6, each.end * 1e6) for each in found]


def overlap_in(events: Sequence[tuple[str, float, float]]) -> Overlap:
    """Return what intervals of the device, with their names, say.

    Args:
        events: name, start and end in microseconds.
    """
    kinds: dict[str, list[Interval]] = {"kernels": [], "out": [], "back": []}
    names: dict[str, list[float]] = {}
    for name, start, end in events:
        if end > start and (kind := _kind_of(name)) is not None:
            kinds[kind].append((start, end))
            names.setdefault(name, []).append(end - start)
    whole = {kind: union(intervals) for kind, intervals in kinds.items()}
    lengths = {kind: length(intervals) for kind, intervals in whole.items()}
    hidden = {kind: _common(whole[kind], whole["kernels"]) for kind in ("out", "back")}
    everything = [each for intervals in whole.values() for each in intervals]
    span = max((end for _, end in everything), default=0.0) - min((start for start, _ in everything), default=0.0)
    lines = [
        "| ms | in all | beside kernels |",
        "|---|---|---|",
        f"| kernels | {lengths['kernels'] / 1e3:.3f} | |",
        *(f"| copies {kind} | {lengths[kind] / 1e3:.3f} | {hidden[kind] / 1e3:.3f} |" for kind in ("out", "back")),
        f"| from the first to the last | {span / 1e3:.3f} | |",
        "",
        "| longest | times | ms |",
        "|---|---|---|",
    ]
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:_LONGEST]
    lines += [f"| {name[:70].replace('|', '/')} | {len(each)} | {sum(each) / 1e3:.3f} |" for name, each in longest]
    page = "\n".join(lines)
    return Overlap(lengths["kernels"], lengths["out"], lengths["back"], hidden["out"], hidden["back"], span, page)


def _kind_of(name: str) -> str | None:
    if name.startswith("Memcpy"):
        return "out" if "DtoH" in name else "back" if "HtoD" in name else "kernels"
    return None if name.startswith("Memset") else "kernels"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same."""
    disjoint: list[Interval] = []
    for begin, end in sorted(intervals):
        if disjoint and begin <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        else:
            disjoint.append((begin, end))
    return disjoint


def length(intervals: Iterable[Interval]) -> float:
    """Return how long intervals are together."""
    return sum(end - begin for begin, end in intervals)


def _common(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Return how much of two disjoint unions coincides."""
    total, index = 0.0, 0
    for start, end in left:
        while index < len(right) and right[index][1] <= start:
            index += 1
        at = index
        while at < len(right) and right[at][0] < end:
            total += min(end, right[at][1]) - max(start, right[at][0])
            at += 1
    return total
