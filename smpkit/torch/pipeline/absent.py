"""How a rank says that a value has no gradient: in the message that would bring it, by a NaN that nobody computes.

Whoever sends a value waits for one message in return. Where nothing that the loss hangs on uses the value, one process
leaves its gradient `None`, and optimizers pass over the weights behind it; zeros would have them decay and move. So the
message is as long as ever, and all of it is one NaN whose bits no operation makes: processors make one NaN of their
own, and otherwise hand on those that they are given, which this one never is.

Types of one byte have no such NaN, and values without elements no room for it: there the gradient is zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint16, c_uint32, c_uint64
from typing import Any, Final

import torch

from smpkit.torch.pipeline.specs import TensorSpec

__all__ = ["absent_gradient", "is_absent"]

_Mark = tuple[Callable[[int], Any], int, torch.dtype]
"""What looks at a word of memory, the NaN's bits in it, and the type of the word."""

_SINGLE: Final[_Mark] = (c_uint32.from_address, 0x7FD3A5C1, torch.int32)
_DOUBLE: Final[_Mark] = (c_uint64.from_address, 0x7FFD3A5C1B2E4D97, torch.int64)
_MARKS: Final[dict[torch.dtype, _Mark]] = {
    torch.bfloat16: (c_uint16.from_address, 0x7FD3, torch.int16),
    torch.float16: (c_uint16.from_address, 0x7ED3, torch.int16),
    torch.float32: _SINGLE,
    torch.float64: _DOUBLE,
    torch.complex64: _SINGLE,
    torch.complex128: _DOUBLE,
}


def absent_gradient(spec: TensorSpec) -> torch.Tensor:
    """Return what travels in place of the gradient of a value that has none; only its bytes count."""
    mark = _MARKS.get(spec.dtype)
    if mark is None:
        return torch.zeros(spec.num_bytes, dtype=torch.uint8, device="cpu")
    _, bits, word = mark
    return torch.full((spec.num_bytes // word.itemsize,), bits, dtype=word, device="cpu")


def is_absent(arrived: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether a message, as it lies in the host's memory without gaps, says that there is no gradient."""
    mark = _MARKS.get(spec.dtype)
    if mark is None or not spec.num_bytes:
        return False
    look, bits, word = mark
    # A look at its first word, for nearly every message has another: an operation on it would cost ten times as much.
    return look(arrived.data_ptr()).value == bits and bool((arrived.view(-1).view(word) == bits).all())
