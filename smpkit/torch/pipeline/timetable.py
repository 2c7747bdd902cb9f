"""In which order the values and gradients of a step travel between GPUs: one order, which all ranks know beforehand.

It follows from the schedule, which every rank has: what an action sends counts from when the action ends, if actions
last as long as they do by default. Nobody looks at a clock: real times may be others, the order stays. See `lanes.py`
for why it must be one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind
from smpkit.plan.schedule.simulate import simulate
from smpkit.torch.pipeline.record import Move

__all__ = ["Passage", "Timetable", "returning", "timetable_of"]


@dataclass(frozen=True)
class Passage:
    """A value, or its gradient (`backward`), that travels once in a step."""

    microbatch: int
    move: Move
    backward: bool

    @property
    def sender(self) -> int:
        return self.move.target if self.backward else self.move.source

    @property
    def receiver(self) -> int:
        return self.move.source if self.backward else self.move.target


@dataclass(frozen=True)
class Timetable:
    """What one rank sends and receives in a step."""

    passages: tuple[Passage, ...]
    """In the order that all ranks follow."""
    blocks: Mapping[int, int]
    """By number of bytes, how many received values and gradients of that size the order makes a rank hold at a time."""


def timetable_of(schedule: Schedule, moves: Sequence[Move], rank: int) -> Timetable:
    """Return what a rank sends and receives in a step that follows a schedule.

    Args:
        moves: of a microbatch; all go the same way.
    """
    sent: defaultdict[tuple[int, bool, int], list[Move]] = defaultdict(list)
    taken: defaultdict[tuple[bool, int], list[Move]] = defaultdict(list)
    for move in moves:
        sent[move.source, False, move.source_segment].append(move)
        if rank == move.target:
            taken[False, move.target_segment].append(move)
        if move.spec.requires_grad and schedule.graph.has_backward:
            sent[move.target, True, move.target_segment].append(move)
            if rank == move.source:
                taken[True, move.source_segment].append(move)
    # Of what ends at once, the lower rank's goes first. An action sends in the order of the moves' numbers.
    ends = sorted(
        (span.end_seconds, place, number)
        for place, spans in enumerate(simulate(schedule).spans)
        for number, span in enumerate(spans)
    )
    passages = []
    for _, sender, number in ends:
        action = schedule.actions[sender][number]
        if action.kind is not Kind.WEIGHT:  # nothing travels by it
            backward = action.kind is Kind.BACKWARD
            found = [Passage(action.microbatch, each, backward) for each in sent[sender, backward, action.segment]]
            passages += [each for each in found if rank in (each.sender, each.receiver)]
    return Timetable(tuple(passages), _blocks(schedule.actions[rank], passages, taken, sent, rank))


def returning(moves: Mapping[int, Sequence[Move]], rank: int) -> Timetable:
    """Return the backward of a step whose microbatches run one after the other.

    Args:
        moves: of microbatches that have a backward, in their order.
    """
    passages = []
    for index, each in moves.items():
        arrivals: defaultdict[tuple[int, int], list[Move]] = defaultdict(list)
        for move in each:
            if move.spec.requires_grad:
                arrivals[move.target, move.target_segment].append(move)
        # What a segment sends has higher numbers than what it got, so its gradients are there when its turn comes.
        for found in sorted(arrivals.values(), key=lambda found: -found[-1].number):
            passages += [Passage(index, move, True) for move in found if rank in (move.source, move.target)]
    return Timetable(tuple(passages), {})


def _blocks(
    actions: Sequence[Action],
    passages: Sequence[Passage],
    taken: Mapping[tuple[bool, int], list[Move]],
    sent: Mapping[tuple[int, bool, int], list[Move]],
    rank: int,
) -> dict[int, int]:
    """Play the list of a rank as `Transport` does, and return how many blocks of each size are in use at most.

    Before anything is sent or taken, all receives begin that come before it. A value is needed until its microbatch is
    over on this rank, for autograd may have saved it; so is a gradient, for a weight's may be made of it later.
    """
    places = {passage: place for place, passage in enumerate(passages)}
    last = {action.microbatch: number for number, action in enumerate(actions)}
    begun = 0
    live: Counter[tuple[int, int]] = Counter()
    most: Counter[int] = Counter()
    for number, action in enumerate(actions):
        if action.kind is not Kind.WEIGHT:
            backward = action.kind is Kind.BACKWARD
            here = [*taken.get((backward, action.segment), ()), *sent.get((rank, backward, action.segment), ())]
            until = max((places[Passage(action.microbatch, move, backward)] + 1 for move in here), default=0)
            for passage in passages[begun:until]:
                size = passage.move.spec.num_bytes
                if passage.receiver == rank and size:
                    live[passage.microbatch, size] += 1
                    in_use = sum(count for (_, num_bytes), count in live.items() if num_bytes == size)
                    most[size] = max(most[size], in_use)
            begun = max(begun, until)
        if last[action.microbatch] == number:
            for key in [key for key in live if key[0] == action.microbatch]:
                del live[key]
    return dict(most)
