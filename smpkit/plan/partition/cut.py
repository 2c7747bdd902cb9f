"""Cut a row of items into neighbouring parts, so that the most expensive part is as cheap as possible.

By dynamic programming, exactly; the items 3 1 4 1 5 9 2 6 in three parts, the most expensive of which costs 14::

    3 1 4 1 | 5 9 | 2 6

With virtual stages every partition holds several parts, its chunks, dealt out like cards. Three partitions with two
chunks each::

    chunk       0 1 2 3 4 5
    partition   0 1 2 0 1 2

The cut makes the most expensive chunk as cheap as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Cost = Callable[[int, int], int]
"""Of (start, end): the cost of a part with the items from `start` to before `end`."""


def cut(num_items: int, num_parts: int, cost: Cost) -> list[int]:
    """Return where each part ends; none is empty, so there must be as many items as parts.

    No other cut has a cheaper worst part; of those that have as cheap a one, none has a smaller sum of squares; of
    those, later parts are larger.

    Args:
        cost: must not fall when a part gets longer; whole numbers, so that equal means equal.
    """
    worst, _ = _cheapest(num_items, num_parts, cost, max, None)
    _, ends = _cheapest(num_items, num_parts, cost, lambda so_far, part: so_far + part * part, worst)
    return ends


def _cheapest(
    num_items: int, num_parts: int, cost: Cost, add: Callable[[int, int], int], limit: int | None
) -> tuple[int, list[int]]:
    """Find by dynamic programming the cut that is cheapest when the costs of its parts are put together with `add`.

    `best[end]` is the value of the cheapest cut of the first `end` items into the parts so far, None if there is none.
    """
    best: list[int | None] = [0, *[None] * num_items]
    starts: list[list[int]] = []
    for _ in range(num_parts):
        row = [_cheapest_last(end, cost, best, add, limit) for end in range(num_items + 1)]
        best, chosen = [value for value, _ in row], [start for _, start in row]
        starts.append(chosen)
    assert best[-1] is not None, "no cut, although there is an item for every part"
    ends = [num_items]
    for chosen in reversed(starts[1:]):
        ends.append(chosen[ends[-1]])
    return best[-1], ends[::-1]


def _cheapest_last(
    end: int, cost: Cost, best: Sequence[int | None], add: Callable[[int, int], int], limit: int | None
) -> tuple[int | None, int]:
    """Return value and start of the cheapest last part that ends at `end`."""
    value, chosen = None, 0
    for start in reversed(range(end)):
        last = cost(start, end)
        # An earlier start only makes the last part more expensive.
        if (limit is not None and last > limit) or (value is not None and add(0, last) > value):
            break
        before = best[start]
        if before is not None and (value is None or add(before, last) <= value):
            value, chosen = add(before, last), start
    return value, chosen
