"""Operations whose result has a shape that depends on values, not on the arguments' shapes alone.

Ranks that do not run a call know its result from the shapes of its arguments. Where the values that decide are in
tensors that every rank holds (labels, lengths, masks made of them), each counts them, and other counts are another kind
of call. A count waits for the device, as the operation itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

__all__ = ["DECIDING_VALUES", "INDEXING", "with_int_bounds"]

_T: Final = torch.Tensor
INDEXING: Final = frozenset({_T.__getitem__, _T.__setitem__})


def with_int_bounds(index: Any) -> Any:
    """Return an index whose slices are bounded by numbers: Python would ask for them where the operation runs only."""
    if isinstance(index, tuple):
        return tuple([with_int_bounds(part) for part in index])
    if isinstance(index, slice):
        return slice(_as_int(index.start), _as_int(index.stop), _as_int(index.step))
    return index


def _as_int(bound: Any) -> Any:
    return bound.__index__() if isinstance(bound, torch.Tensor) else bound


def _mask_counts(_value: Any, index: Any = None, **names: Any) -> tuple[int, ...]:
    """Return how many elements each mask chooses."""
    index = names.get("mask", index)
    parts = index if isinstance(index, tuple | list) else (index,)
    return tuple([int(part.count_nonzero()) for part in _plain(*parts) if part.dtype is torch.bool])


def _sum_and_max(*args: Any, **names: Any) -> tuple[int, ...]:
    """Return the sum and the largest of lengths or repetitions."""
    found = [part for part in _plain(*args[1:], *names.values()) if part.numel()]
    return tuple([int(number) for part in found for number in (part.sum(), part.max())])


def _plain(*values: Any) -> Iterator[torch.Tensor]:
    return (value for value in values if type(value) is torch.Tensor)


DECIDING_VALUES: Final[dict[Any, Callable[..., tuple[int, ...]]]] = {
    _T.__getitem__: _mask_counts,
    _T.masked_select: _mask_counts,
    torch.masked_select: _mask_counts,
    _T.repeat_interleave: _sum_and_max,
    torch.repeat_interleave: _sum_and_max,
    torch._C._VariableFunctions._pack_padded_sequence: _sum_and_max,
}
"""By operation, what tells results of other shapes apart: a function of its arguments."""
