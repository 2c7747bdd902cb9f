"""Rows of parametrized tests: few of many combinations, and those that only slow runs try."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return rows of one value per axis that hold every pair of values, chosen greedily and always the same."""
    rows = list(itertools.product(*axes))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def slow(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return rows that are tried with `-m slow`."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def _pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
