"""When loads are issued: as late as possible, never too late; compared with a stream played forward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smpkit.plan.offload.work import MAX_LEAD, auto_lead

_SECONDS = st.integers(0, 8).map(float)
_WORK = st.lists(st.tuples(_SECONDS, _SECONDS), min_size=1, max_size=MAX_LEAD)


def _stall_seconds(compute: list[float], load: list[float], issues: list[int]) -> float:
    """Play one stream forward: a load starts when it is issued and the stream is free."""
    now = free = stall = 0.0
    ends = [0.0] * len(compute)
    for piece, seconds in enumerate(compute):
        for other, issue in enumerate(issues):
            if issue == piece and load[other]:
                ends[other] = free = max(free, now) + load[other]
        if load[piece]:
            stall += max(0.0, ends[piece] - now)
            now = max(now, ends[piece])
        now += seconds
    return stall


@given(_WORK)
def test_lead_is_the_smallest_without_a_stall(work: list[tuple[float, float]]) -> None:
    compute, load = map(list, zip(*work, strict=True))
    if _stall_seconds(compute, load, [0] * len(work)):
        return

    def stall(lead: int) -> float:
        return _stall_seconds(compute, load, [max(0, piece - lead) for piece in range(len(work))])

    lead = auto_lead(compute, load)
    assert stall(lead) == 0
    assert lead == 1 or stall(lead - 1) > 0


def test_lead_is_bounded_where_the_link_cannot_keep_up_and_at_least_one() -> None:
    assert auto_lead([1.0] * 20 + [3.0] * 20, [0.0] * 20 + [9.0] * 20) == MAX_LEAD
    assert (auto_lead([1.0], [0.0]), auto_lead([], [])) == (1, 1)
