"""The part of `smpkit plan` that is about what travels: the segments of each stage, and the values between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from smpkit.cli._console import fold, table, width

if TYPE_CHECKING:
    from smpkit.plan.schedule.graph import Segment
    from smpkit.plan.schedule.recorded_graph import RecordedGraph, SentValue

__all__ = ["plain", "report"]

_MAX_ROWS: Final = 12
_KIB: Final = 1024


def report(recorded: RecordedGraph) -> Iterator[str]:
    """Yield the section: what one microbatch sends, and, where it comes back to a stage, what each visit runs."""
    forward = sum(value.num_bytes for value in recorded.values)
    back = sum(value.num_bytes for value in recorded.values if value.differentiable)
    count = f"{len(recorded.values)} value{'s' * (len(recorded.values) != 1)}"
    yield f"values    a microbatch sends {count}, {_bytes(forward)}, and {_bytes(back)} of gradients back"
    yield from _visits(recorded)
    rows = list(_rows(recorded))
    if rows:
        yield from table([["from", "to", "value", "bytes", "for"], *rows[:_MAX_ROWS]], width())
    if len(rows) > _MAX_ROWS:
        yield f"(and {len(rows) - _MAX_ROWS} more kinds of values, which `--json` lists)"


def _visits(recorded: RecordedGraph) -> Iterator[str]:
    """Yield the units of each segment of the stages that a microbatch visits more than once."""
    counts = Counter(segment.rank for segment, _ in recorded.segments)
    for segment, names in recorded.segments:
        if counts[segment.rank] > 1:
            shown = list(dict.fromkeys(names)) or ["no unit, only operations between them"]
            shown = shown if len(shown) <= 4 else [shown[0], shown[1], f"… {shown[-1]}"]
            yield from fold(f"{_label(segment)}: ", [*(f"{name}," for name in shown[:-1]), shown[-1]], width(), " ")


def _rows(recorded: RecordedGraph) -> Iterator[list[str]]:
    """Yield a row for all values of one kind between the same segments."""
    groups: dict[tuple[Any, ...], list[SentValue]] = {}
    for value in recorded.values:
        key = (value.source, value.target, value.dtype, value.shape, value.differentiable)
        groups.setdefault(key, []).append(value)
    for values in groups.values():
        first = values[0]
        times = f"{len(values)} × " if len(values) > 1 else ""
        kind = (
            f"{times}{first.dtype}[{', '.join(map(str, first.shape))}]{'' if first.differentiable else ' no gradient'}"
        )
        consumers = list(dict.fromkeys(value.consumer for value in values))
        more = f", … {consumers[-1]}" if len(consumers) > 1 else ""
        num_bytes = sum(value.num_bytes for value in values)
        yield [_label(first.source), _label(first.target), kind, _bytes(num_bytes), consumers[0] + more]


def _label(segment: Segment) -> str:
    """Write a segment as the drawing of the schedule numbers it: `stage 0`, and `stage 0.1` for its second visit."""
    return f"stage {segment.rank}{f'.{segment.index}' if segment.index else ''}"


def _bytes(num_bytes: float) -> str:
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if num_bytes < _KIB:
            break
        num_bytes, unit = num_bytes / _KIB, larger
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"


def plain(recorded: RecordedGraph) -> dict[str, Any]:
    """Return the section for programs."""
    return {
        "segments": [
            {"stage": segment.rank, "index": segment.index, "units": list(dict.fromkeys(names))}
            for segment, names in recorded.segments
        ],
        "values": [
            {
                **{key: part for key, part in asdict(value).items() if key not in ("source", "target")},
                "source": [value.source.rank, value.source.index],
                "target": [value.target.rank, value.target.index],
            }
            for value in recorded.values
        ],
    }
