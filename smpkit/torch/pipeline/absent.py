"""How a rank says that a value has no gradient: the gradient message carries a NaN that no operation makes.

Each value that is sent forward is answered by one gradient message. If the loss does not depend on the value, its
gradient is `None` in a single process, and optimizers skip the weights behind it; with zeros they would decay and
move. So the message has its usual length, and every element is one reserved NaN pattern that means `None`: processors
generate one NaN of their own and otherwise propagate the NaNs of their inputs, and this one is never an input.

Types of one byte have no such NaN, and values without elements no room for it: there the gradient is zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint16, c_uint32, c_uint64
from typing import Any, Final

import torch

from smpkit.torch.pipeline.specs import TensorSpec

__all__ = ["is_none_gradient", "none_gradient_message"]

_Sentinel = tuple[Callable[[int], Any], int, torch.dtype]
"""A function that reads a word of memory, the bits of the NaN, and the type of the word."""

_SINGLE: Final[_Sentinel] = (c_uint32.from_address, 0x7FD3A5C1, torch.int32)
_DOUBLE: Final[_Sentinel] = (c_uint64.from_address, 0x7FFD3A5C1B2E4D97, torch.int64)
_SENTINELS: Final[dict[torch.dtype, _Sentinel]] = {
    torch.bfloat16: (c_uint16.from_address, 0x7FD3, torch.int16),
    torch.float16: (c_uint16.from_address, 0x7ED3, torch.int16),
    torch.float32: _SINGLE,
    torch.float64: _DOUBLE,
    torch.complex64: _SINGLE,
    torch.complex128: _DOUBLE,
}


def none_gradient_message(spec: TensorSpec) -> torch.Tensor:
    """Return the message that stands for the gradient `None`; only its bytes count."""
    sentinel = _SENTINELS.get(spec.dtype)
    if sentinel is None:
        return torch.zeros(spec.num_bytes, dtype=torch.uint8, device="cpu")
    _, bits, word = sentinel
    return torch.full((spec.num_bytes // word.itemsize,), bits, dtype=word, device="cpu")


def is_none_gradient(received: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether a message, as it lies in the host's memory without gaps, says that there is no gradient."""
    sentinel = _SENTINELS.get(spec.dtype)
    if sentinel is None or not spec.num_bytes:
        return False
    read_word, bits, word = sentinel
    # Compare the first word in Python: nearly every message differs there, and a torch operation costs ten times more.
    return read_word(received.data_ptr()).value == bits and bool((received.view(-1).view(word) == bits).all())
