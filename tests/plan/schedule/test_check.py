from __future__ import annotations

from dataclasses import replace

import pytest

from smpkit.plan.schedule.actions import Action, Schedule, check
from smpkit.plan.schedule.graph import ScheduleError, SegmentGraph


def schedule(*lists: str, caps: tuple[int, ...] = (9, 9)) -> Schedule:
    actions = tuple(tuple(map(Action.parse, text.split())) for text in lists)
    return Schedule("test", SegmentGraph.chain(2), 2, actions, caps)


WRONG = {
    "missing": (schedule("F0 F1 B0", "F0 B0 F1 B1"), "rank 0 never runs B1"),
    "twice": (schedule("F0 F1 B0 B1 F1", "F0 B0 F1 B1"), "rank 0 runs F1, more than once"),
    "unknown microbatch": (schedule("F0 F1 B0 B1", "F0 B0 F1 B1 F2"), "rank 1 runs F2, which does not exist"),
    "unknown segment": (schedule("F0 F1 B0 B1", "F0 B0 F1 B1 F0.1"), "rank 1 runs F0.1, which does not exist"),
    "cap": (
        schedule("F0 F1 B0 B1", "F0 B0 F1 B1", caps=(1, 1)),
        "rank 0 has 2 microbatches live in F1, its cap is 1",
    ),
    "half split": (schedule("F0 F1 B0 B1", "F0 F1 B0 B1 W0"), "rank 1 never runs W1"),
    "split of a segment that sends no gradient": (
        schedule("F0 F1 B0 W0 B1", "F0 F1 B0 B1 W0 W1"),
        "rank 0 runs W0, which does not exist",
    ),
    "weight half first": (
        replace(schedule("F0 B0", "F0 W0 B0"), num_microbatches=1),
        "rank 1 in W0 waits for B0 of rank 1",
    ),
    "deadlock": (
        schedule("F0 B0 F1 B1", "F1 B1 F0 B0"),
        "stands still: rank 0 in B0 waits for B0 of rank 1; rank 1 in F1 waits for F1 of rank 0",
    ),
    "before its forward": (schedule("B0 F0 F1 B1", "F0 B0 F1 B1"), "rank 0 in B0 waits for F0 of rank 0"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_schedule_is_refused_by_name(wrong: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(wrong)
