"""What `smpkit plan --svg` draws: schedules, and what the ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from smpkit.cli._planned import GIB, Planned
from smpkit.plan.memory import RankMemory
from smpkit.plan.svg import Bar, Bars, Drawing

__all__ = ["memory_bars", "of_plan", "of_plans"]

_MIB: Final = 1024**2


def of_plan(made: Planned) -> Iterator[Drawing | Bars]:
    """Yield the schedule, unless it is that of one rank, and the memory of each stage, where it is known."""
    if made.plan.mesh.pp_size > 1 or not made.plan.memory:
        yield _schedule(made)
    if made.plan.memory:
        rows = {f"stage {stage}": memory.parts_bytes for stage, memory in enumerate(made.plan.memory)}
        yield memory_bars("memory of a rank", rows, made.limit_gib)


def of_plans(plans: Sequence[tuple[str, Planned]]) -> Iterator[Drawing | Bars]:
    """Yield several plans: the schedule of each, or with a model what the fullest rank of each holds."""
    for name, made in plans:
        if not made.plan.memory:
            yield _schedule(made, f"{name}: ")
    rows = {name: _fullest(made).parts_bytes for name, made in plans if made.plan.memory}
    if rows:
        yield memory_bars("memory of the fullest rank", rows, plans[0][1].limit_gib)


def memory_bars(title: str, rows: Mapping[str, Mapping[str, float]], limit_gib: float | None) -> Bars:
    """Return bars of bytes, in GiB where the largest has one.

    Args:
        rows: bytes by kind, for each row.
        limit_gib: what a rank has.
    """
    most = max(sum(parts.values()) for parts in rows.values())
    size, unit = (GIB, "GiB") if max(most, (limit_gib or 0) * GIB) >= GIB else (_MIB, "MiB")
    bars = [Bar(name, {kind: value / size for kind, value in parts.items()}) for name, parts in rows.items()]
    if limit_gib is None:
        return Bars(title, bars, unit)
    return Bars(f"{title}, of {limit_gib:g} GiB", bars, unit, limit_gib * GIB / size)


def _schedule(made: Planned, prefix: str = "") -> Drawing:
    timeline = made.plan.timeline
    schedule = timeline.schedule
    title = f"{schedule.name}, {schedule.num_microbatches} microbatches, bubble {timeline.bubble:.1%}"
    return Drawing(f"{prefix}{title}", timeline)


def _fullest(made: Planned) -> RankMemory:
    return max(made.plan.memory, key=lambda memory: memory.total_bytes)
