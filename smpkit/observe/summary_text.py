"""The block at the end of a run: a summary as lines of at most 71 columns, which a launcher may put `[rank 0] ` before.

One process without parallelism gets two or three lines; more ranks get a table, of many only the fullest and slowest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Final

from smpkit.config.words import duration
from smpkit.observe.summary import Gain, KindBytes, RankSummary, RunSummary, Split
from smpkit.units import amount, count, seconds

__all__ = ["block", "gained"]

_MAX_RANKS: Final = 8
_WIDTH: Final = 71
_KINDS: Final = tuple(field.name for field in fields(KindBytes))
_PARTS: Final = tuple(field.name for field in fields(Split))
_SHORT: Final = {"gradients": "grads", "activations": "activ.", "offloaded": "on host"}
_UNKNOWN: Final = "–"
_HIDDEN_SHARE: Final = 0.0005
"""A part of the step below this is not shown where all ranks are below it."""


def block(summary: RunSummary) -> list[str]:
    """Return the lines."""
    return list(_lines(summary))


def _lines(summary: RunSummary) -> Iterator[str]:
    steps = f"run     {summary.steps:,} step{'s' * (summary.steps != 1)} in {duration(summary.seconds)}"
    rates = list(_rates(summary))
    yield from _folded(f"{steps}: " if rates else steps, rates)
    if summary.values:
        ends = summary.values.items()
        yield from _folded("values  ", [f"{name} {first:.4g} → {last:.4g}" for name, (first, last) in ends])
    shown = _chosen(summary.ranks)
    if shown:
        yield from _step(summary, shown)
        yield from _memory(summary, shown)
    for gain in summary.gains:
        yield from _folded(f"gain    {gain.feature}: {gained(gain)}")
    for note in summary.notes:
        yield from _folded(f"note    {note}")


def _rates(summary: RunSummary) -> Iterator[str]:
    """Yield how fast a run was, as far as that is known."""
    for unit in ("steps", "samples", "tokens"):
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


def _chosen(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """Return the ranks to show: of many, those that hold most, wait most and compute most."""
    if len(ranks) <= _MAX_RANKS:
        return list(ranks)
    most = (
        max(ranks, key=_held),
        max(ranks, key=lambda each: each.split.compute),
        max(ranks, key=lambda each: each.split.bubble + each.split.communication + each.split.stall),
    )
    return sorted({each.rank: each for each in most}.values(), key=lambda each: each.rank)


def _held(rank: RankSummary) -> int:
    return rank.device_peak or rank.peak.on_device


def _step(summary: RunSummary, shown: Sequence[RankSummary]) -> Iterator[str]:
    total = max(rank.split.total for rank in shown)
    if not total:
        return
    parts = [part for part in _PARTS if any(_share(rank, part) >= _HIDDEN_SHARE for rank in shown)]
    if len(summary.ranks) == 1:
        yield from _folded(f"step    {seconds(total)}: ", [f"{part} {_share(shown[0], part):.1%}" for part in parts])
        return
    of = "" if len(shown) == len(summary.ranks) else f"; of {len(summary.ranks):,} ranks the fullest and slowest"
    yield f"step    {seconds(total)}{of}"
    shares = [[str(rank.rank), *(f"{_share(rank, part):.1%}" for part in parts)] for rank in shown]
    yield from _table([["rank", *parts], *shares])


def _share(rank: RankSummary, part: str) -> float:
    total = rank.split.total
    return float(getattr(rank.split, part)) / total if total else 0.0


def _memory(summary: RunSummary, shown: Sequence[RankSummary]) -> Iterator[str]:
    """Yield the most of each kind, and below each rank what was planned, if anything was."""
    kinds = [kind for kind in _KINDS if any(getattr(rank.peak, kind) for rank in shown)]
    process = [rank.device_peak for rank in shown if rank.device_peak is not None]
    if not kinds and not process:
        return
    largest = max([*process, *(rank.peak.on_device for rank in shown)])
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    columns = [*kinds, *(["at once"] if process else [])]
    rows = [["rank", *columns]]
    for rank in shown:
        peaks = [*(getattr(rank.peak, kind) for kind in kinds), *([rank.device_peak] if process else [])]
        rows.append([str(rank.rank), *("" if each is None else f"{each / size:.1f}" for each in peaks)])
        if rank.planned is not None:
            planned = [getattr(rank.planned, kind) for kind in kinds]
            # Without activations, as where the first step had no backward, a total would be of nothing.
            planned += [rank.planned.on_device if rank.planned.activations else 0] if process else []
            rows.append(["plan", *(f"{each / size:.1f}" if each else _UNKNOWN for each in planned)])
    if len(summary.ranks) == 1 and len(rows) == 2:
        values = [f"{name} {value}" for name, value in zip(columns, rows[1][1:], strict=True)]
        yield from _folded(f"memory  peaks in {unit}: ", values)
        return
    yield f"memory  peaks in {unit}"
    yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; one too wide loses spacing, then the names of columns are cut."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    gap = 2 if sum(widths) + 2 * len(widths) <= _WIDTH else 1
    if sum(widths) + len(widths) + 1 > _WIDTH:
        rows = [[_SHORT.get(name, name) for name in rows[0]], *rows[1:]]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (" " * gap).join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {cells}".rstrip()


def _folded(head: str, parts: Sequence[str] = ()) -> list[str]:
    """Return a line, or several: broken between the parts, of which none is broken, or between the words of `head`."""
    text = head + ", ".join(part.replace(" ", "\xa0") for part in parts)
    lines = textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]
