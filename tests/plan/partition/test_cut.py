from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.partition.cut import cut


def split(items: list[int], num_parts: int) -> list[int]:
    return cut(len(items), num_parts, lambda start, end: sum(items[start:end]))


def test_the_documented_example() -> None:
    assert split([3, 1, 4, 1, 5, 9, 2, 6], 3) == [4, 6, 8]


@pytest.mark.parametrize(
    ("items", "num_parts", "ends"),
    [([1, 1, 1, 1, 1], 2, [2, 5]), ([1, 1, 1, 1], 4, [1, 2, 3, 4]), ([9, 1, 1, 1, 1], 3, [1, 3, 5]), ([5], 1, [1])],
    ids=["ties leave more to later parts", "one each", "even beside a giant", "one"],
)
def test_ties_are_broken_for_balance(items: list[int], num_parts: int, ends: list[int]) -> None:
    assert split(items, num_parts) == ends


@given(items=st.lists(st.integers(0, 9), min_size=1, max_size=8), num_parts=st.integers(1, 4))
def test_no_cut_is_better(items: list[int], num_parts: int) -> None:
    num_parts = min(num_parts, len(items))

    def value(ends: Sequence[int]) -> tuple[int, int]:
        costs = [sum(items[start:end]) for start, end in pairwise([0, *ends])]
        return max(costs), sum(cost * cost for cost in costs)

    all_cuts = [(*inner, len(items)) for inner in combinations(range(1, len(items)), num_parts - 1)]
    assert value(split(items, num_parts)) == min(map(value, all_cuts))
