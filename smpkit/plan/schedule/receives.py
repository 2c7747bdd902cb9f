"""When receives are posted, ahead of the actions that need their values, and what memory values on their way take.

A backend such as gloo sends data only once the receive is posted, so a rank posts those of its next actions early. The
runtime follows these rules, and `smpkit plan` counts with them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from smpkit.plan.schedule.actions import Action, Schedule
from smpkit.plan.schedule.graph import Kind, Segment

__all__ = ["LOOKAHEAD", "message_bytes", "num_ahead"]

LOOKAHEAD: Final = 2
"""For how many of the actions after the current one receives are posted."""
_AHEAD_BYTES: Final = 1 << 20
"""Bytes of receives that are posted before the first wait."""


def num_ahead(received_bytes: Sequence[int]) -> int:
    """Return for how many of a rank's first actions receives are posted before its first wait.

    Args:
        received_bytes: of each action of the rank, in order.
    """
    return max(1, sum(num_bytes <= _AHEAD_BYTES for num_bytes in accumulate(received_bytes)))


def message_bytes(schedule: Schedule) -> list[list[int]]:
    """Return for each action of each rank what the rank holds beside activations because values travel.

    Those are values that no action has taken yet, received ahead, and values that others may still read: see `_sent`.
    """
    sent, received = _sent(schedule), _received_bytes(schedule)
    found = []
    for rank, actions in enumerate(schedule.actions):
        sizes = [received[action.kind, Segment(rank, action.segment)] for action in actions]
        ends, first = [0, *accumulate(sizes)], num_ahead(sizes)
        held = []
        for index, action in enumerate(actions):
            begin = index if action.kind is Kind.BACKWARD else index + 1  # a forward's are activations by now
            end = min(len(sizes), max(first, index + 1 + LOOKAHEAD))
            held.append(ends[end] - ends[begin] + sent[rank][index])
        found.append(held)
    return found


@dataclass(frozen=True)
class _Message:
    """A message: the actions that send and take it, by their indices, and what it carries."""

    sending: int
    taking: int
    value: Hashable
    num_bytes: int


def _sent(schedule: Schedule) -> list[list[int]]:
    """Return for each action of each rank the bytes of what it has sent and not released.

    A rank knows that a value has arrived once it gets a message from an action of the receiver that comes after the one
    which takes the value. In a phase of forwards alone no such message comes. A value that goes to several ranks is
    held once.
    """
    ways = _messages(schedule)
    held: list[dict[Hashable, tuple[int, int, int]]] = [{} for _ in schedule.actions]
    """By rank and value: from which action to which, and how many bytes."""
    for (sender, receiver), messages in ways.items():
        answers = sorted((each.taking, each.sending) for each in ways.get((receiver, sender), ()))
        latest = list(accumulate((sending for _, sending in answers), max))
        """By answer, the last action of the receiver that the sender knows of."""
        for each in messages:
            known = bisect_right(latest, each.taking)
            released = max(each.sending, answers[known][0]) if known < len(answers) else len(schedule.actions[sender])
            begin, end, _ = held[sender].get(each.value, (each.sending, released, 0))
            held[sender][each.value] = min(begin, each.sending), max(end, released), each.num_bytes
    found = []
    for actions, values in zip(schedule.actions, held, strict=True):
        changes = [0] * (len(actions) + 1)
        for begin, end, num_bytes in values.values():
            changes[begin] += num_bytes
            changes[end] -= num_bytes
        found.append(list(accumulate(changes))[:-1])
    return found


def _messages(schedule: Schedule) -> dict[tuple[int, int], list[_Message]]:
    """Return the messages of a step by sender and receiver."""
    place = {
        (rank, action): index for rank, actions in enumerate(schedule.actions) for index, action in enumerate(actions)
    }
    ways: defaultdict[tuple[int, int], list[_Message]] = defaultdict(list)
    kept = {(each.target.rank, each.value) for each in schedule.graph.transfers if each.value and each.differentiable}
    """Values that a rank has received and keeps for their gradients: what it sends of them takes no more."""
    for index, each in enumerate(schedule.graph.transfers):
        kinds = [(Kind.FORWARD, each.source, each.target)]
        if each.differentiable and schedule.graph.has_backward:
            kinds.append((Kind.BACKWARD, each.target, each.source))
        for kind, source, target in kinds if each.is_message else ():
            num_bytes = 0 if kind is Kind.FORWARD and (source.rank, each.value) in kept else each.num_bytes
            value = each.value if each.value and kind is Kind.FORWARD else (kind, index)
            for number in range(schedule.num_microbatches):
                sending = place[source.rank, Action(kind, source.index, number)]
                taking = place[target.rank, Action(kind, target.index, number)]
                ways[source.rank, target.rank].append(_Message(sending, taking, (number, value), num_bytes))
    return ways


def _received_bytes(schedule: Schedule) -> Counter[tuple[Kind, Segment]]:
    """Return what an action receives from other ranks, by its kind and segment."""
    received: Counter[tuple[Kind, Segment]] = Counter()
    for each in schedule.graph.transfers:
        if each.is_message:
            received[Kind.FORWARD, each.target] += each.num_bytes
            received[Kind.BACKWARD, each.source] += each.num_bytes if each.differentiable else 0
    return received
