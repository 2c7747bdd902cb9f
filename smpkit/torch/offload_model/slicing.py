"""Cut a chain of layers into neighbouring slices, so that the largest slice is as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, Literal

from torch import nn

from smpkit.errors import UsageError
from smpkit.plan.partition.cut import cut

__all__ = ["Balance", "check_count", "slice_ends"]

Balance = Literal["params", "bytes"] | Sequence[float]
"""What makes slices equal: the number of parameters, their bytes, or a cost given for each layer (measured seconds)."""

_RESOLUTION: Final = 1 << 40  # `cut` compares whole numbers; a millionth of a millionth of the total is fine enough


def slice_ends(layers: Sequence[nn.Module], num_slices: int, balance: Balance = "params") -> list[int]:
    """Return where each slice ends; none is empty, and no other cut has a smaller largest slice.

    Args:
        layers: what is called one after the other.
        num_slices: how many are wanted; more than there are layers means one layer each.
        balance: see `Balance`.

    Raises:
        UsageError: a count below 1, an unknown balance, or costs that do not fit the layers.
    """
    check_count("num_slices", num_slices)
    total = [0, *accumulate(_costs(layers, balance))]
    count = min(num_slices, len(layers))
    return cut(len(layers), lambda _, start, end: total[end] - total[start], [True] * count)


def check_count(name: str, value: Any) -> None:
    """Raise UsageError unless an argument is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a whole number, at least 1")


def _costs(layers: Sequence[nn.Module], balance: Balance) -> list[int]:
    if balance == "params":
        return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    if balance == "bytes":
        return [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    given: Any = balance
    if isinstance(given, str):
        raise UsageError(f"balance is {given!r}; it must be 'params', 'bytes' or a list with a cost for each layer")
    if len(balance) != len(layers) or min(balance) < 0:
        raise UsageError(f"balance must give {len(layers)} layers a cost of at least 0 each; it is {list(balance)}")
    whole = sum(balance) or 1.0
    return [round(cost / whole * _RESOLUTION) for cost in balance]
