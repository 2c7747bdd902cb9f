from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.partition.cut import cut, even_out
from tests.plan.graphs import SETTINGS


def cost_of(items: list[int]) -> Callable[[int, int, int], int]:
    sums = list(accumulate(items, initial=0))
    return lambda chunk, start, end: sums[end] - sums[start]


def totals(items: list[int], ends: list[int], num_partitions: int) -> list[int]:
    starts = [0, *ends[:-1]]
    chunks = [sum(items[start:end]) for start, end in zip(starts, ends, strict=True)]
    return [sum(chunks[place::num_partitions]) for place in range(num_partitions)]


@pytest.mark.parametrize(
    ("items", "ends", "better"),
    [
        ([1, 1, 1, 1, 1, 1], [2, 3, 5, 6], [3, 3]),
        ([1] * 10, [2, 4, 5, 7, 8, 10], [5, 5]),
        ([5, 1, 1, 1], [1, 2, 3, 4], [6, 2]),
    ],
    ids=["four and two", "four and six", "nothing can move"],
)
def test_partitions_are_evened_out(items: list[int], ends: list[int], better: list[int]) -> None:
    assert totals(items, even_out(ends, cost_of(items), 2), 2) == better


@given(
    items=st.lists(st.integers(0, 9), min_size=6, max_size=12),
    num_partitions=st.integers(1, 3),
    num_chunks=st.integers(1, 2),
)
@SETTINGS
def test_nothing_becomes_dearer_or_empty(items: list[int], num_partitions: int, num_chunks: int) -> None:
    cost = cost_of(items)
    ends = cut(len(items), cost, [True] * (num_partitions * num_chunks))
    found = even_out(ends, cost, num_partitions)
    chunks, before = (totals(items, each, len(each)) for each in (found, ends))
    assert max(chunks) <= max(before)
    assert sorted(set(found)) == found
    assert found[-1] == len(items)
    assert max(totals(items, found, num_partitions)) <= max(totals(items, ends, num_partitions))
