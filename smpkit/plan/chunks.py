"""Virtual stages: every partition holds several chunks of the model, dealt out like cards.

Three partitions with two chunks each, of a row of units::

    chunk       0 1 2 3 4 5
    partition   0 1 2 0 1 2

The cut of the row makes the dearest chunk as cheap as it can be; here the chunks of one partition are evened out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

__all__ = ["even_out", "partition_of_chunk"]


def partition_of_chunk(chunk: int, num_partitions: int) -> int:
    """Return where a chunk lies."""
    return chunk % num_partitions


def even_out(ends: Sequence[int], cost: Callable[[int, int, int], int], num_partitions: int) -> list[int]:
    """Return the ends of chunks after units were moved so that the dearest partition is cheaper.

    No chunk becomes dearer than the dearest one was, and none becomes empty that was not.

    Args:
        ends: where each chunk ends.
        cost: of (chunk, start, end); whole numbers.
        num_partitions: chunk k is on partition k mod this.
    """
    best = list(ends)
    limit = max(_chunk_costs(best, cost))
    score = _score(best, cost, num_partitions)
    while True:
        found = [(_score(move, cost, num_partitions), move) for move in _moves(best, cost, limit)]
        better = min(found, default=(score, best))
        if better[0] >= score:
            return best
        score, best = better


def _score(ends: Sequence[int], cost: Callable[[int, int, int], int], num_partitions: int) -> tuple[int, int]:
    """Return the cost of the dearest partition, then the sum of squares."""
    totals = [0] * num_partitions
    for chunk, each in enumerate(_chunk_costs(ends, cost)):
        totals[partition_of_chunk(chunk, num_partitions)] += each
    return max(totals), sum(total * total for total in totals)


def _chunk_costs(ends: Sequence[int], cost: Callable[[int, int, int], int]) -> list[int]:
    return [cost(chunk, start, end) for chunk, (start, end) in enumerate(pairwise([0, *ends]))]


def _moves(ends: list[int], cost: Callable[[int, int, int], int], limit: int) -> Iterator[list[int]]:
    """Yield the cuts in which neighbouring boundaries have moved by one unit: one chunk gives, another one gets."""
    empty = {chunk for chunk, (start, end) in enumerate(pairwise([0, *ends])) if start == end}
    for first in range(len(ends) - 1):
        for last in range(first, len(ends) - 1):
            for step in (-1, 1):
                moved = [end + step * (first <= place <= last) for place, end in enumerate(ends)]
                sizes = [end - start for start, end in pairwise([0, *moved])]
                if any(size < (chunk not in empty) for chunk, size in enumerate(sizes)):
                    continue
                if max(_chunk_costs(moved, cost)) <= limit:
                    yield moved
