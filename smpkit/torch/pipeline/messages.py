"""Messages between the ranks of a pipeline: what travels, their tags, their labels in errors, and their bytes.

All microbatches of a kind make the same transfers, which the first one records (`TransferRecord`).

Three kinds of bytes travel: a value or gradient as it lies in memory; several tensors packed into one block (`pack`);
and the `None` gradient, a reserved NaN.

[Note: None gradients] Each value that is sent forward is answered by one gradient message. If the loss does not depend
on the value, its gradient is `None` in a single process, and optimizers skip the weights behind it; with zeros they
would decay and move. So the message has its usual length, and every element is one reserved NaN pattern that means
`None`: processors generate one NaN of their own and otherwise propagate the NaNs of their inputs, and this one is never
an input. Types of one byte have no such NaN, and values without elements no room for it: there the gradient is zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import c_uint16, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, Final

import torch

from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import TensorSpec, as_bytes, as_layout

TRANSFERS_PER_MICROBATCH: Final = 1 << 15
"""How many numbers each microbatch has for its transfers: no two messages of a step share a tag."""


@dataclass(frozen=True, eq=False)  # each has an identity, by which `message_of` finds its messages
class P2PTransfer:
    """A value that one rank sends to another, once; `number` counts those of a microbatch, alike on all ranks."""

    number: int
    source: int
    target: int
    source_segment: int
    target_segment: int
    spec: TensorSpec
    consumer: str = ""
    """What needed the value: a unit or an operation."""

    @functools.cached_property
    def trace(self) -> str:
        """Its entry in the call traces, which ranks compare."""
        return f"a transfer of {self.spec} from rank {self.source} to rank {self.target}"

    def __str__(self) -> str:
        consumer = f" for `{self.consumer}`" if self.consumer else ""
        return f"{self.spec} from rank {self.source} to rank {self.target}{consumer}"


@dataclass(frozen=True)
class TransferRecord:
    """The transfers of the first microbatch of a kind, which the schedule and later microbatches follow."""

    transfers: tuple[P2PTransfer, ...]
    changed: frozenset[int]
    """Numbers of transfers from this rank whose value was changed in place after the send: they are sent as copies."""


class Message:
    """A value, or its gradient (`backward`), that travels once in a step."""

    __slots__ = ("backward", "microbatch", "number", "receiver", "sender", "transfer")

    def __init__(self, microbatch: int, transfer: P2PTransfer, backward: bool) -> None:
        self.microbatch, self.transfer, self.backward = microbatch, transfer, backward
        self.number = (microbatch * TRANSFERS_PER_MICROBATCH + transfer.number) * 2 + backward
        """Unique among the messages of a step; a gradient has the number after its value's."""
        self.sender, self.receiver = transfer.source, transfer.target
        if backward:
            self.sender, self.receiver = self.receiver, self.sender

    def __str__(self) -> str:
        kind, value = ("backward", "gradient of ") if self.backward else ("forward", "")
        consumer = f" for `{self.transfer.consumer}`" if self.transfer.consumer else ""
        return f"{kind} of microbatch {self.microbatch} ({value}{self.transfer.spec}{consumer})"


message_of: Final = functools.lru_cache(maxsize=1 << 12)(Message)
"""`Message`, the same object for the same arguments: steps that follow a record send the same messages each time."""


class Tag:
    """Tags of everything but the values and gradients of microbatches, whose tags are smaller."""

    OBJECT: Final = (1 << 30) + 1
    """The size of an object; the object itself comes under the next tag."""
    CALL_TRACES: Final = OBJECT + 2
    INPUTS: Final = OBJECT + 4
    """Of objects, as `CALL_TRACES`: each takes two tags."""
    INPUT_DATA: Final = OBJECT + 6
    CHECKSUMS: Final = OBJECT + 7
    OUTPUTS: Final = OBJECT + 8
    HEADERS: Final = OBJECT + 9
    """Of messages between GPUs."""


MessageLabel = str | Message
"""What a message is: its text stands in errors."""

_HOST: Final = torch.device("cpu")
_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")

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


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into one block of bytes on the host.

    From an asynchronous device the copy is only queued: see `to_host`.
    """
    device = next((tensor.device for tensor in tensors if devices.is_asynchronous(tensor.device)), _HOST)
    parts = [as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()) for tensor in tensors] or [_NOTHING]
    return to_host(torch.cat([part if part.device == device else devices.to_device(part, device) for part in parts]))


def to_host(block: torch.Tensor) -> torch.Tensor:
    """Return bytes on the host; from an asynchronous device their copy is only queued, on its current stream."""
    if block.device == _HOST:
        return block
    return devices.host_memory(len(block), block.device).copy_(block, non_blocking=True)


def packed_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of a block that `pack` makes."""
    return sum([spec.num_bytes for spec in specs])


def unpack(block: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return copies of the tensors in a block, each with the shape and dtype of its spec."""
    parts = block.split_with_sizes([spec.num_bytes for spec in specs])
    return [part.clone().view(spec.dtype).view(spec.shape) for part, spec in zip(parts, specs, strict=True)]


def none_gradient_message(spec: TensorSpec) -> torch.Tensor:
    """Return the message for the gradient `None`, see [Note: None gradients]; only its bytes count."""
    sentinel = _SENTINELS.get(spec.dtype)
    if sentinel is None:
        return torch.zeros(spec.num_bytes, dtype=torch.uint8, device="cpu")
    _, bits, word = sentinel
    return torch.full((spec.num_bytes // word.itemsize,), bits, dtype=word, device="cpu")


def is_none_gradient(received: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether a received message, dense on the host, means that the gradient is None."""
    sentinel = _SENTINELS.get(spec.dtype)
    if sentinel is None or not spec.num_bytes:
        return False
    read_word, bits, word = sentinel
    # Compare the first word in Python: nearly every message differs there, and a torch operation costs ten times more.
    return read_word(received.data_ptr()).value == bits and bool((received.view(-1).view(word) == bits).all())


def laid_out(received: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a received tensor with the memory layout that it had on the sender."""
    if spec.order is None:
        return received
    # Detach it: autograd treats in-place changes of a view differently, and this would be a view of the buffer.
    return as_layout(received, spec.shape, spec.order, spec.stride).detach()
