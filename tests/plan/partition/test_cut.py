from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.partition.cut import cut
from tests.plan.graphs import SETTINGS


def split(items: list[int], needs: list[bool], base: list[int] | None = None) -> list[int]:
    base = base or [0] * len(needs)
    return cut(len(items), lambda part, start, end: base[part] + sum(items[start:end]), needs)


def all_cuts(num_items: int, needs: list[bool]) -> list[list[int]]:
    cuts = ([*inner, num_items] for inner in combinations_with_replacement(range(num_items + 1), len(needs) - 1))
    return [
        ends
        for ends in cuts
        if all(end - start >= need for (start, end), need in zip(pairwise([0, *ends]), needs, strict=True))
    ]


def test_the_documented_example() -> None:
    assert split([3, 1, 4, 1, 5, 9, 2, 6], [True] * 3) == [4, 6, 8]


@pytest.mark.parametrize(
    ("items", "num_parts", "ends"),
    [([1, 1, 1, 1, 1], 2, [2, 5]), ([1, 1, 1, 1], 4, [1, 2, 3, 4]), ([9, 1, 1, 1, 1], 3, [1, 3, 5]), ([5], 1, [1])],
    ids=["ties leave more to later parts", "one each", "even beside a giant", "one"],
)
def test_ties_are_broken_for_balance(items: list[int], num_parts: int, ends: list[int]) -> None:
    assert split(items, [True] * num_parts) == ends


def test_parts_that_hold_something_may_get_nothing() -> None:
    assert split([1, 1], [False, True, False], [9, 0, 9]) == [0, 2, 2]


@given(
    items=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    parts=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=4),
)
@SETTINGS
def test_no_cut_is_better(items: list[int], parts: list[tuple[bool, int]]) -> None:
    needs = [need and number < len(items) for number, (need, _) in enumerate(parts)]
    base = [value for _, value in parts]

    def value(ends: list[int]) -> tuple[int, int]:
        costs = [extra + sum(items[start:end]) for extra, (start, end) in zip(base, pairwise([0, *ends]), strict=True)]
        return max(costs), sum(cost * cost for cost in costs)

    assert value(split(items, needs, base)) == min(value(ends) for ends in all_cuts(len(items), needs))
