"""Types and sizes of what is saved: few, and the same in every step, so one object stands for all that are alike."""

from __future__ import annotations

from typing import Final

import torch

from smpkit.torch.offload.arena import Form

__all__ = ["CASTS", "Forms"]

CASTS: Final = frozenset({torch.float16, torch.bfloat16})
"""Types that autocast makes of parameters."""
_ORDINARY: Final = CASTS | {
    *(torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
"""Types of which no tensor is quantized or conjugated."""
_MOST: Final = 1024


class Forms:
    """Keeps forms, to compare them without looking inside: lists of them are compared whenever a layer leaves."""

    def __init__(self) -> None:
        self.ordinary: dict[torch.dtype, dict[torch.Size, Form]] = {dtype: {} for dtype in _ORDINARY}
        """By size, of the types of which every tensor may leave."""
        self._others: dict[torch.dtype, dict[torch.Size, Form]] = {}

    def doubt(self, *, casts: bool) -> None:
        """Say whether there are parameters whose casts may be among tensors of half precision."""
        there, here = (self.ordinary, self._others) if casts else (self._others, self.ordinary)
        for dtype in CASTS & there.keys():
            here[dtype] = there.pop(dtype)

    def form(self, dtype: torch.dtype, size: torch.Size) -> Form:
        """Return the form for this type and size."""
        alike = self.ordinary.get(dtype)
        if alike is None:
            alike = self._others.setdefault(dtype, {})
        if len(alike) >= _MOST:  # the sizes of one's data vary without end
            alike.clear()
        return alike.setdefault(size, (dtype, size))
