from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smpkit.observe.events import ActionSpan, EventsError, RankLog, StepSpan
from smpkit.observe.merge import merge
from tests.observe.logs import chain, header, logs_of


def log(rank: int, *, size: int = 2, start_ns: int = 0, **changes: Any) -> RankLog:
    events = (ActionSpan(0, "F", 0, 0, start_ns, start_ns + 5), StepSpan(0, "step", "", start_ns, start_ns + 9))
    return RankLog(header(rank, size, **changes), events, truncated=False)


def test_ranks_of_one_clock_keep_their_distance_whenever_they_left_the_barrier() -> None:
    run = merge([log(0, start_ns=1000, anchor_ns=100), log(1, start_ns=1007, anchor_ns=150)])
    assert [run.step(rank, 0).actions[0].start_ns for rank in range(2)] == [900, 907]


def test_clocks_of_two_hosts_meet_at_the_barrier() -> None:
    run = merge([log(0, start_ns=1000, anchor_ns=100), log(1, start_ns=999_000, anchor_ns=998_050, clock="other")])
    assert [run.step(rank, 0).actions[0].start_ns for rank in range(2)] == [900, 950]


def test_only_steps_that_every_rank_finished_count() -> None:
    logs = logs_of(chain(2, 2), num_steps=3)
    logs[1] = replace(logs[1], events=logs[1].events[:-1], truncated=True)
    run = merge(logs)
    assert run.steps == (0, 1)
    assert run.truncated == (1,)


def test_pipelines_are_listed_in_the_order_of_stages() -> None:
    places = [(pp, rdp) for rdp in range(2) for pp in range(2)]
    logs = [log(rank, pp=pp, rdp=rdp, rdp_size=2) for rank, (pp, rdp) in enumerate(places)]
    assert merge(logs).pipelines == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        ([log(1)], "of 2 ranks, the events of 0 are missing"),
        ([log(0, size=12)], "the events of 1, 2, 3, 4, 5, 6, 7, 8 and 3 more are missing"),
        ([log(0), log(1, run="other")], "the events of rank 1 are of another run"),
        ([log(0), log(1, tp_size=2)], "the events of rank 1 are of another run"),
        ([log(0), log(1, pp=0)], "claim a place in the grid"),
    ],
    ids=["missing", "many missing", "run", "mesh", "place"],
)
def test_files_that_do_not_belong_together_are_refused(logs: list[RankLog], message: str) -> None:
    with pytest.raises(EventsError, match=message):
        merge(logs)
