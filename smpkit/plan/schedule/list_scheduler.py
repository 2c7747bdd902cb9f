"""Greedy list scheduling: the rank that can start first runs the most urgent of what it could start then.

[Note: why caps cannot deadlock] A rank admits microbatches in ascending order (every rank prefers the smaller one, and
links keep the order), and no more than its cap at a time. Take the smallest microbatch that is not finished everywhere.
On a rank that has admitted it, its next task waits only for tasks of the same microbatch. On a rank that has not, no
later microbatch is admitted either, so nothing is live there and the cap leaves room for it. Hence something can always
run, for every graph and all caps of at least one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

from smpkit.plan.schedule.actions import Action, Costs
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.tasks import LinkModel, Task, tasks_of

Urgency = tuple[int, int, int, int]
"""Priority of the kind, group of the microbatch, number of the task, microbatch: smaller goes first."""
Head = tuple[float, Urgency]
"""When a rank's best next task can start, and which one it is."""
_NEVER: Final[Head] = (float("inf"), (0, 0, 0, 0))


def list_schedule(
    graph: SegmentGraph,
    num_microbatches: int,
    caps: Sequence[int],
    costs: Costs,
    *,
    split_backward: bool = False,
    forwards_first: bool = False,
    group: int = 1,
    depths: Sequence[int] | None = None,
) -> tuple[tuple[tuple[Action, ...], ...], float]:
    """Return every rank's actions and when the last one ends.

    Of what it could do at a time, a rank does backward before forward before weights, then the smaller microbatch. With
    caps of `P - rank` on a chain that is 1F1B; with groups of P on a loop, interleaved 1F1B.

    Args:
        caps: for each rank, how many microbatches may be live; at least one.
        forwards_first: hold back a rank's backwards until all of its forwards have run (GPipe).
        depths: for each rank, the most microbatches before their last BACKWARD. Unlike `caps`, it leaves out those
            that only wait for WEIGHT. None: as many as caps allow.
        group: number of neighbouring microbatches that go through a segment before the first of them goes on.
    """
    tasks = tasks_of(graph, costs, split_backward)
    own = [[task for task in tasks if task.segment.rank == rank] for rank in range(graph.num_ranks)]
    limits = zip(caps, depths or caps, own, strict=True)
    ranks = [_RankQueue(*limit, num_microbatches, holds_backwards=forwards_first) for limit in limits]
    links = LinkModel(costs)
    missing = [[task.num_needs for task in tasks] for _ in range(num_microbatches)]
    ready_seconds = [[0.0] * len(tasks) for _ in range(num_microbatches)]

    def offer(number: int, microbatch: int) -> None:
        task = tasks[number]
        urgency = task.priority, microbatch // group, number, microbatch
        ranks[task.segment.rank].offer(ready_seconds[microbatch][number], urgency, task)

    for number, task in enumerate(tasks):
        if not task.num_needs:
            for microbatch in range(num_microbatches):
                offer(number, microbatch)
    heads = [rank.head() for rank in ranks]
    for _ in range(len(tasks) * num_microbatches):
        head = min(heads)
        assert head != _NEVER, "no rank can go on; caps below the number of microbatches hold back forwards"
        _, _, number, microbatch = head[1]
        task = tasks[number]
        source = task.segment.rank
        end_seconds = ranks[source].take(head, task)
        touched = {source}
        for edge in task.edges:
            target = tasks[edge.target].segment.rank
            arrival = links.arrival_seconds(source, target, edge.transfer, end_seconds)
            ready_seconds[microbatch][edge.target] = max(ready_seconds[microbatch][edge.target], arrival)
            missing[microbatch][edge.target] -= 1
            if not missing[microbatch][edge.target]:
                offer(edge.target, microbatch)
                touched.add(target)
        for rank in touched:
            heads[rank] = ranks[rank].head()
    return tuple(tuple(rank.order) for rank in ranks), max(rank.free_seconds for rank in ranks)


class _RankQueue:
    """What one rank could do next."""

    def __init__(
        self, cap: int, depth: int, tasks: Sequence[Task], num_microbatches: int, *, holds_backwards: bool
    ) -> None:
        self.free_seconds = 0.0
        self.order: list[Action] = []
        self._cap, self._depth = cap, depth
        self._live = self._inside = 0
        self._left = [len(tasks)] * num_microbatches
        # The same without the tasks that nothing waits for, which do not count for the depth.
        self._left_inside = [sum(not task.fills_gaps for task in tasks)] * num_microbatches
        # First tasks of microbatches that are not admitted yet, in ascending order.
        self._arrived: deque[Head] = deque()
        self._coming: list[Head] = []
        self._ready: list[Urgency] = []
        # For GPipe: how many forwards are left, and the backwards that are held back until none is.
        self._forwards_left = num_microbatches * sum(task.kind is Kind.FORWARD for task in tasks) * holds_backwards
        self._held: list[Head] = []

    def offer(self, seconds: float, urgency: Urgency, task: Task) -> None:
        """Take a task that can start at `seconds`."""
        if task.kind is Kind.FORWARD and not task.segment.index:
            self._arrived.append((seconds, urgency))
        elif self._forwards_left and task.kind is not Kind.FORWARD:
            self._held.append((seconds, urgency))
        else:
            heappush(self._coming, (seconds, urgency))

    def head(self) -> Head:
        """Return the task that this rank would do next, and when."""
        while self._coming and self._coming[0][0] <= self.free_seconds:
            heappush(self._ready, heappop(self._coming)[1])
        best = _NEVER
        if self._ready:
            best = (self.free_seconds, self._ready[0])
        elif self._coming:
            best = self._coming[0]
        if self._arrived and self._live < self._cap and self._inside < self._depth:
            seconds, urgency = self._arrived[0]
            best = min(best, (max(seconds, self.free_seconds), urgency))
        return best

    def take(self, head: Head, task: Task) -> float:
        """Run the head and return when it ends."""
        seconds, urgency = head
        microbatch = urgency[3]
        if self._ready and self._ready[0] == urgency:
            heappop(self._ready)
        elif self._coming and self._coming[0] == head:
            heappop(self._coming)
        else:
            self._arrived.popleft()
            self._live += 1
            self._inside += 1
        self.order.append(task.action(microbatch))
        self._left[microbatch] -= 1
        self._live -= not self._left[microbatch]
        if not task.fills_gaps:
            self._left_inside[microbatch] -= 1
            self._inside -= not self._left_inside[microbatch]
        if self._forwards_left and task.kind is Kind.FORWARD:
            self._forwards_left -= 1
            while self._held and not self._forwards_left:
                heappush(self._coming, self._held.pop())
        self.free_seconds = seconds + task.seconds
        return self.free_seconds
