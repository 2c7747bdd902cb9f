"""When loads are issued: as late as possible, never too late; compared with a lane played forward."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpkit.errors import UsageError
from smpkit.plan.offload.lead import auto_lead, latest_issues

_SECONDS = st.integers(0, 8).map(float)
_WORK = st.lists(st.tuples(_SECONDS, _SECONDS), min_size=1, max_size=30)


def _stall_seconds(compute: list[float], load: list[float], issues: list[int]) -> float:
    """Play one lane forward: a load starts when it is issued and the lane is free."""
    now = lane = stall = 0.0
    ends = [0.0] * len(compute)
    for piece, seconds in enumerate(compute):
        for other, issue in enumerate(issues):
            if issue == piece and load[other]:
                ends[other] = lane = max(lane, now) + load[other]
        if load[piece]:
            stall += max(0.0, ends[piece] - now)
            now = max(now, ends[piece])
        now += seconds
    return stall


def _ahead(lead: int, num_pieces: int) -> list[int]:
    return [max(0, piece - lead) for piece in range(num_pieces)]


@given(_WORK)
def test_loads_at_the_latest_points_do_not_stall_unless_nothing_helps(work: list[tuple[float, float]]) -> None:
    compute, load = [list(each) for each in zip(*work, strict=True)]
    least = _stall_seconds(compute, load, [0] * len(work))
    assert _stall_seconds(compute, load, latest_issues(compute, load)) == least


@given(_WORK)
def test_lead_is_the_smallest_without_a_stall(work: list[tuple[float, float]]) -> None:
    compute, load = [list(each) for each in zip(*work, strict=True)]
    lead = auto_lead(compute, load)
    if _stall_seconds(compute, load, [0] * len(work)):
        return
    assert _stall_seconds(compute, load, _ahead(lead, len(work))) == 0
    if lead > 1:
        assert _stall_seconds(compute, load, _ahead(lead - 1, len(work))) > 0


@pytest.mark.parametrize(("copy", "lead"), [(0.1, 1), (1.0, 1), (2.0, 2), (3.0, 3)])
def test_lead_covers_the_copy_with_forwards(copy: float, lead: int) -> None:
    assert auto_lead([1.0] * 4 + [3.0] * 4, [0.0] * 4 + [copy] * 4) == lead


def test_lead_is_bounded_where_the_link_cannot_keep_up() -> None:
    assert auto_lead([1.0] * 8 + [3.0] * 8, [0.0] * 8 + [9.0] * 8, most=4) == 4


def test_nothing_to_load_needs_the_least_lead() -> None:
    assert auto_lead([1.0], [0.0]) == 1
    assert auto_lead([], []) == 1


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(UsageError, match="1 compute times and 2 load times"):
        latest_issues([1.0], [1.0, 2.0])
