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

Cost = Callable[[int, int, int], int]
"""Of (part, start, end): the cost of a part with the items from `start` to before `end`."""


def cut(num_items: int, cost: Cost, needs_item: Sequence[bool]) -> list[int]:
    """Return where each part ends.

    No other cut has a cheaper worst part; of those that have as cheap a one, none has a smaller sum of squares; of
    those, later parts are larger.

    Args:
        cost: must not fall when a part gets longer; whole numbers, so that equal means equal.
        needs_item: for each part, whether it may not be empty; there must be an item for each that needs one.
    """
    worst, _ = _cheapest(num_items, cost, needs_item, max, None)
    _, ends = _cheapest(num_items, cost, needs_item, lambda so_far, part: so_far + part * part, worst)
    return ends


def _cheapest(
    num_items: int, cost: Cost, needs_item: Sequence[bool], add: Callable[[int, int], int], limit: int | None
) -> tuple[int, list[int]]:
    """Find by dynamic programming the cut that is cheapest when the costs of its parts are put together with `add`.

    `best[end]` is the value of the cheapest cut of the first `end` items into the parts so far, None if there is none.
    """
    best: list[int | None] = [0, *[None] * num_items]
    starts: list[list[int]] = []
    for part, needs in enumerate(needs_item):
        row = [_cheapest_last(part, end, cost, end - needs, best, add, limit) for end in range(num_items + 1)]
        best, chosen = [value for value, _ in row], [start for _, start in row]
        starts.append(chosen)
    assert best[-1] is not None, "no cut, although there is an item for every part that needs one"
    ends = [num_items]
    for chosen in reversed(starts[1:]):
        ends.append(chosen[ends[-1]])
    return best[-1], ends[::-1]


def _cheapest_last(
    part: int,
    end: int,
    cost: Cost,
    latest: int,
    best: Sequence[int | None],
    add: Callable[[int, int], int],
    limit: int | None,
) -> tuple[int | None, int]:
    """Return value and start of the cheapest last part that ends at `end` and starts at `latest` or before."""
    value, chosen = None, 0
    for start in range(latest, -1, -1):
        last = cost(part, start, end)
        # An earlier start only makes the last part more expensive.
        if (limit is not None and last > limit) or (value is not None and add(0, last) > value):
            break
        before = best[start]
        if before is not None and (value is None or add(before, last) <= value):
            value, chosen = add(before, last), start
    return value, chosen
