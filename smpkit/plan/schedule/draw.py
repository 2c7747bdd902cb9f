"""Draw a schedule as text: a line per pipeline rank, time to the right.

In unit time, where every action takes one column, 1F1B of three ranks and four microbatches is::

    stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

and to scale, with a backward twice as long as a forward, where `--` continues the action before it::

    stage 0  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
    stage 1  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
    stage 2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from smpkit.plan.schedule.actions import Costs, Schedule
from smpkit.plan.schedule.simulate import ActionInterval, Timeline, simulate

_UNIT: Final = Costs(forward_seconds=1, backward_seconds=1, weight_seconds=0)
_UNIT_SPLIT: Final = Costs(forward_seconds=1, backward_seconds=2, weight_seconds=1)
_MAX_COLUMNS: Final = 200


def draw(what: Schedule | Timeline, column_seconds: float | None = None, width: int | None = None) -> str:
    """Return the picture of a schedule, in unit time, or of a timeline, to scale.

    Args:
        column_seconds: the time of one column; by default the shortest action, or more where that makes the picture
            wider than 200 columns. An action gets at least one column.
        width: characters of a line; a longer picture goes on below itself, after an empty line.
    """
    if isinstance(what, Schedule):
        return draw(simulate(what, _UNIT_SPLIT if what.splits_backward else _UNIT), 1.0, width)
    column_seconds = column_seconds or _column_seconds(what)
    rows = [_cells(spans, column_seconds) for spans in what.spans]
    num_columns = max(round(what.makespan_seconds / column_seconds), *(len(row) for row in rows), 0)
    cell = max(map(len, chain.from_iterable(rows)), default=1)
    heads = [f"stage {rank}".ljust(len(f"stage {len(rows) - 1}")) for rank in range(len(rows))]
    for row in rows:
        row.extend(["."] * (num_columns - len(row)))
    at_once = num_columns if width is None else max(1, (width - len(heads[0]) - 1) // (cell + 1))
    blocks: list[str] = []
    for start in range(0, max(num_columns, 1), max(at_once, 1)):
        part = [row[start : start + at_once] for row in rows]
        blocks.append("\n".join(_line(head, cells, cell) for head, cells in zip(heads, part, strict=True)))
    return "\n\n".join(blocks)


def _column_seconds(timeline: Timeline) -> float:
    lengths = [span.end_seconds - span.start_seconds for span in chain.from_iterable(timeline.spans)]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    return max(shortest, timeline.makespan_seconds / _MAX_COLUMNS)


def _cells(spans: Sequence[ActionInterval], column_seconds: float) -> list[str]:
    """Return what stands in each column of one rank, up to its last action."""
    cells: list[str] = []
    for span in spans:
        start, end = round(span.start_seconds / column_seconds), round(span.end_seconds / column_seconds)
        cells += ["."] * (start - len(cells))
        cells += [str(span.action), *["--"] * (end - len(cells) - 1)]
    return cells


def _line(head: str, cells: Sequence[str], width: int) -> str:
    return f"{head}  {' '.join(cell.ljust(width) for cell in cells)}".rstrip()
