"""Schedules that need no search: 1F1B of a chain, and interleaved 1F1B of a loop (virtual stages), written down.

Two ranks with two chunks each, four microbatches, every action one unit of time, drawn by `smpkit.plan.schedule.draw`;
`F1.1` is the forward of microbatch 1 through its rank's second chunk::

    stage 0  F0   F1   F0.1 F1.1 F2   B0.1 F3   B1.1 F2.1 B0   F3.1 B1   .    B2.1 .    B3.1 B2   B3
    stage 1  .    F0   F1   F0.1 B0.1 F1.1 B1.1 F2   B0   F3   B1   F2.1 B2.1 F3.1 B3.1 B2   B3   .
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise, zip_longest

from smpkit.plan.schedule.actions import Action, Costs, Schedule
from smpkit.plan.schedule.graph import Kind, SegmentGraph
from smpkit.plan.schedule.list_scheduler import list_schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return 1F1B of a chain: each rank holds as many microbatches as there are ranks from it to the end."""
    graph = SegmentGraph.chain(num_ranks)
    actions, _ = list_schedule(graph, num_microbatches, graph.depths, Costs())
    return Schedule("1f1b", graph, num_microbatches, actions, tuple(min(cap, num_microbatches) for cap in graph.depths))


def looped(graph: SegmentGraph, num_microbatches: int, num_groups: int, warmup_per_rank: int) -> Schedule:
    """Write interleaved 1F1B of a loop down; the graph must be one, and have a backward.

    A rank holds several chunks of the model, so filling the pipe takes a fraction of the time. Microbatches go round in
    groups of P; where P does not divide their number, the first groups are larger by one, which costs no time.

    Args:
        num_groups: how many groups there are, of about the same size. If they have fewer than P microbatches, ranks
            hold fewer, and are idle between the chunks.
        warmup_per_rank: how many forwards more than the next rank a rank begins with: 2 hide link time.
    """
    num_ranks, num_chunks = graph.num_ranks, graph.loop_chunks
    groups = _groups(num_microbatches, num_groups)
    rounds = [(chunk, microbatch) for group in groups for chunk in range(num_chunks) for microbatch in group]
    forwards = [Action(Kind.FORWARD, chunk, microbatch) for chunk, microbatch in rounds]
    # The backward of a round goes through the chunks in reverse order.
    backwards = [Action(Kind.BACKWARD, num_chunks - 1 - chunk, microbatch) for chunk, microbatch in rounds]
    actions = []
    for rank in range(num_ranks):
        warmup = (num_ranks - 1 - rank) * warmup_per_rank + (num_chunks - 1) * len(groups[0])
        turns = chain.from_iterable(zip_longest(forwards[warmup:], backwards))
        actions.append((*forwards[:warmup], *(action for action in turns if action is not None)))
    draft = Schedule("looped", graph, num_microbatches, tuple(actions), (num_microbatches,) * num_ranks)
    return replace(draft, caps=draft.peak_live_microbatches)


def _groups(num_microbatches: int, num_groups: int) -> list[range]:
    """Cut the microbatches into groups of about the same size, larger ones first."""
    size, larger = divmod(num_microbatches, num_groups)
    ends = [number * size + min(number, larger) for number in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
