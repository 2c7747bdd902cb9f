"""Types and sizes of what is saved: few, and the same in every step, so one object stands for all that are alike."""

from __future__ import annotations

from typing import Final

import torch

from smpkit.torch.offload.arena import ContiguousSpec

__all__ = ["AUTOCAST_DTYPES", "SpecCache"]

AUTOCAST_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
"""Types that autocast makes of parameters."""
_PLAIN_DTYPES: Final = AUTOCAST_DTYPES | {
    *(torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
"""Types of which no tensor is quantized or conjugated."""
_MAX_SIZES: Final = 1024


class SpecCache:
    """Interns specs, so that lists of them, which are compared for every layer, compare by identity."""

    def __init__(self) -> None:
        self.always_offloadable: dict[torch.dtype, dict[torch.Size, ContiguousSpec]] = {
            dtype: {} for dtype in _PLAIN_DTYPES
        }
        """By size, of the types of which every tensor may leave."""
        self._others: dict[torch.dtype, dict[torch.Size, ContiguousSpec]] = {}

    def check_half_precision(self, *, may_be_casts: bool) -> None:
        """Check fp16 and bf16 tensors from now on if they may be autocast copies of parameters."""
        there, here = (
            (self.always_offloadable, self._others) if may_be_casts else (self._others, self.always_offloadable)
        )
        for dtype in AUTOCAST_DTYPES & there.keys():
            here[dtype] = there.pop(dtype)

    def spec(self, dtype: torch.dtype, size: torch.Size) -> ContiguousSpec:
        """Return the spec of this dtype and size."""
        specs_by_size = self.always_offloadable.get(dtype)
        if specs_by_size is None:
            specs_by_size = self._others.setdefault(dtype, {})
        if len(specs_by_size) >= _MAX_SIZES:  # the sizes of one's data vary without end
            specs_by_size.clear()
        return specs_by_size.setdefault(size, (dtype, size))
