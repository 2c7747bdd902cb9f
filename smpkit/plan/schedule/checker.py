"""Check that a schedule runs to its end: every rank replays its list, and blocks where the executor would.

The checker shares no code with the planner, so a mistake of the one is not repeated by the other.
"""

from __future__ import annotations

from collections import Counter

from smpkit.plan.schedule.actions import Action, Schedule, live_microbatches
from smpkit.plan.schedule.graph import Kind, Need, ScheduleError, Segment


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, naming rank and action, unless the schedule can be executed.

    It can when every rank does everything exactly once, no rank ever has more microbatches live than its cap, and, with
    receives that block and sends that do not, every rank comes to the end of its list (no deadlock).
    """
    _check_shape(schedule)
    for rank in range(schedule.graph.num_ranks):
        _check_complete(schedule, rank)
        _check_cap(schedule, rank)
    _replay(schedule)


def _check_shape(schedule: Schedule) -> None:
    num_ranks = schedule.graph.num_ranks
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"a schedule of {schedule.num_microbatches} microbatches")
    if len(schedule.actions) != num_ranks or len(schedule.caps) != num_ranks:
        lists = f"{len(schedule.actions)} lists of actions and {len(schedule.caps)} caps"
        raise ScheduleError(f"a schedule with {lists} for {num_ranks} ranks")


def _check_complete(schedule: Schedule, rank: int) -> None:
    expected = Counter[Action]()
    for segment in range(schedule.graph.counts[rank]):
        for kind in schedule.graph.kinds(Segment(rank, segment), schedule.splits_backward):
            expected.update(Action(kind, segment, microbatch) for microbatch in range(schedule.num_microbatches))
    actual = Counter(schedule.actions[rank])
    if missing := sorted((expected - actual).elements()):
        raise ScheduleError(f"rank {rank} never runs {' '.join(map(str, missing))}")
    if surplus := sorted((actual - expected).elements()):
        text = "more than once" if surplus[0] in expected else "which does not exist in this graph"
        raise ScheduleError(f"rank {rank} runs {surplus[0]}, {text}")


def _check_cap(schedule: Schedule, rank: int) -> None:
    actions, cap = schedule.actions[rank], schedule.caps[rank]
    for action, live in zip(actions, live_microbatches(actions), strict=True):
        if live > cap:
            raise ScheduleError(f"rank {rank} has {live} microbatches live in {action}, its cap is {cap}")


Done = set[tuple[Kind, Segment, int]]


def _replay(schedule: Schedule) -> None:
    """Let the ranks take turns, each running until it blocks, until none of them gets further."""
    done: Done = set()
    next_index = [0] * schedule.graph.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while next_index[rank] < len(actions):
                action = actions[next_index[rank]]
                if _blocker(schedule, rank, action, done) is not None:
                    break
                done.add((action.kind, Segment(rank, action.segment), action.microbatch))
                next_index[rank] += 1
                moved = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if next_index[rank] < len(actions)]
    if stuck:
        waits = [_wait(schedule, rank, schedule.actions[rank][next_index[rank]], done) for rank in stuck]
        raise ScheduleError(f"the schedule stands still: {'; '.join(waits)}")


def _blocker(schedule: Schedule, rank: int, action: Action, done: Done) -> Need | None:
    for need in schedule.graph.needs(action.kind, Segment(rank, action.segment)):
        if (need.kind, need.segment, action.microbatch) not in done:
            return need
    return None


def _wait(schedule: Schedule, rank: int, action: Action, done: Done) -> str:
    need = _blocker(schedule, rank, action, done)
    assert need is not None
    missing = Action(need.kind, need.segment.index, action.microbatch)
    return f"rank {rank} in {action} waits for {missing} of rank {need.segment.rank}"
