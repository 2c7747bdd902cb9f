"""The block at the end of a run: a summary in lines of at most 71 columns, which a launcher may put `[rank 0] ` before.

Two ranks get at most eight lines. What is left out is in the report: memory by kind, what each feature gained.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from smpkit.config.words import duration
from smpkit.observe.summary import Gain, RankSummary, RunSummary, parts_of
from smpkit.units import amount, count, seconds

_MAX_RANKS: Final = 8
_WIDTH: Final = 71
_INDENT: Final = " " * 8


def block(summary: RunSummary) -> Iterator[str]:
    """Yield the lines."""
    steps = f"run     {summary.steps:,} step{'s' * (summary.steps != 1)}"
    rates = list(_rates(summary))
    if summary.steps_per_s is None:
        yield f"{steps} in {duration(summary.seconds)}"
    else:
        steps += f" of {seconds(1 / summary.steps_per_s)}"
        yield from _folded(f"{steps}: " if rates else steps, rates)
    if summary.values:
        ends = [f"{name} {first:.4g} → {last:.4g}" for name, (first, last) in summary.values.items()]
        yield _cut("values  ", ends)
    yield from _time(summary)
    if any(rank.most_bytes for rank in summary.ranks):
        yield _memory(summary)
    if summary.gains:
        most = sorted(summary.gains, key=lambda gain: gain.bytes_with - gain.bytes_without)
        yield _cut("saved   ", [f"{amount(gain.bytes_without - gain.bytes_with)} by {gain.feature}" for gain in most])
    for note in summary.notes:
        yield from _folded(f"note    {note}")


def _rates(summary: RunSummary) -> Iterator[str]:
    """Yield the rates that are known, without that of steps, which the length of a step says."""
    for unit in ("samples", "tokens"):
        rate = getattr(summary, f"{unit}_per_s")
        if rate is not None:
            yield f"{count(rate)} {unit}/s"
    if summary.flops_share is not None:
        yield f"{summary.flops_share:.0%} of {summary.flops_basis or 'peak'}"


def gained(gain: Gain) -> str:
    """Say what a feature gained: `3.0 MiB instead of 9.0 MiB on the device of rank 0, 0.4% slower (measured)`."""
    slower = "" if gain.slower is None else f", {abs(gain.slower):.1%} {'slower' if gain.slower >= 0 else 'faster'}"
    sizes = f"{amount(gain.bytes_with)} instead of {amount(gain.bytes_without)}"
    return f"{sizes} on the device of rank {gain.rank}{slower} ({gain.basis})"


def _time(summary: RunSummary) -> Iterator[str]:
    """Yield where the time of a step went: in a line for one rank, in a table for more."""
    shown = _chosen(summary.ranks)
    parts = parts_of(shown)
    if not parts:
        return
    if len(summary.ranks) == 1:
        yield from _folded("time    ", [f"{part} {shown[0].share(part):.1%}" for part in parts])
        return
    rows = [["rank", *parts]]
    rows += [[str(rank.rank), *(f"{rank.share(part):.1%}" for part in parts)] for rank in shown]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{_INDENT if index else 'time    '}{cells}"
    if len(shown) < len(summary.ranks):
        yield f"{_INDENT}the fullest and the slowest of {len(summary.ranks):,} ranks"


def _chosen(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """Return the ranks to show: of many, those that hold most, wait most and compute most."""
    if len(ranks) <= _MAX_RANKS:
        return list(ranks)
    most = (
        max(ranks, key=lambda rank: rank.most_bytes),
        max(ranks, key=lambda rank: rank.split.compute),
        max(ranks, key=lambda rank: rank.split.bubble + rank.split.communication + rank.split.stall),
    )
    return sorted({rank.rank: rank for rank in most}.values(), key=lambda rank: rank.rank)


def _memory(summary: RunSummary) -> str:
    """Return the peak of the rank that held most, and what was planned for that rank."""
    rank = max(summary.ranks, key=lambda rank: rank.most_bytes)
    of = " in tensors" if rank.device_size is None else f" of {amount(rank.device_size)}"
    place = f" (rank {rank.rank})" if len(summary.ranks) > 1 else ""
    # Without activations, as where the first step had no backward, a total would be of nothing.
    is_planned = rank.planned is not None and rank.planned.activations
    planned = f", planned {amount(rank.planned.on_device)}" if rank.planned is not None and is_planned else ""
    return f"memory  at most {amount(rank.most_bytes)}{of}{place}{planned}"


def _cut(head: str, parts: Sequence[str]) -> str:
    """Return one line with as many of the parts as fit, and at least the first."""
    fitting = list(parts)
    while len(fitting) > 1 and len(head) + len(", ".join(fitting)) + len(", …") * (len(fitting) < len(parts)) > _WIDTH:
        fitting.pop()
    return f"{head}{', '.join([*fitting, '…'][: len(parts)])}"


def _folded(head: str, parts: Sequence[str] = ()) -> list[str]:
    """Return a line, or several: broken between the parts, of which none is broken, or between the words of `head`."""
    text = head + ", ".join(part.replace(" ", "\xa0") for part in parts)
    lines = textwrap.wrap(text, _WIDTH, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]
