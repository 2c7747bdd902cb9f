"""Give every rank of a pipeline the batch of pp_rank 0, as SMP v1 did.

The ranks relay the tensors, since each needs them later than the one before; pp_rank 0 sends one message and waits for
nobody::

    head                                                                          rest
    checksum of shapes | order of each tensor's dimensions | as much as fits of   the tensors

The head is as long as the message of the step before, which all ranks know, so it most often holds everything. The
checksum comes first, so that ranks with different batches find out before anything else is sent.

On all ranks, pp_rank 0 included, the tensors are dense and in the memory order of those of pp_rank 0: results of calls
depend on strides, and a rank that took `batch[:, :-1]` for another kind of argument than the others would wait for them
for ever.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import TensorSpec, as_layout, spec_of, to_layout
from smpkit.torch.pipeline.messages import Tag, packed_bytes, unpack
from smpkit.torch.pipeline.transport import Transport

__all__ = ["FIRST_BYTES", "InputBroadcast"]

FIRST_BYTES: Final = 64 * 1024
"""Size of the head in the first step; also its largest size."""
_CHECKSUM_BYTES: Final = 16
"""With padding, so that what follows is aligned."""
_WHAT: Final = "the inputs of the step"


class _Frame(NamedTuple):
    """A block of bytes that travels: checksum, dimension orders, tensors, with a view for each tensor."""

    specs: tuple[TensorSpec, ...]
    block: torch.Tensor
    views: list[torch.Tensor]


class InputBroadcast:
    """The inputs of a pipeline's steps on this rank.

    Args:
        transport: the way to the neighbours.
        rank, size: pp_rank and pp_size.
        device: where they are used.
    """

    def __init__(self, transport: Transport, rank: int, size: int, device: torch.device) -> None:
        self.head_bytes = FIRST_BYTES
        """Size of the message that begins a step, the same on all ranks."""
        self._transport = transport
        self._rank = rank
        self._size = size
        self._device = device
        self._next_head_bytes = FIRST_BYTES
        self._frame: _Frame | None = None
        """The one of the step before, which most often fits again: the pipeline waits while pp_rank 0 makes one."""
        self._in_flight: _Frame | None = None

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that pp_rank 0 passed; all ranks call this with tensors of the same shapes and dtypes.

        Raises:
            UsageError: the shapes or dtypes are not those of pp_rank 0.
        """
        specs = tuple([spec_of(tensor) for tensor in tensors])
        layout = _layout(specs)
        num_bytes, head_bytes = _CHECKSUM_BYTES + len(layout) + packed_bytes(specs), self.head_bytes
        self._next_head_bytes = min(FIRST_BYTES, num_bytes)
        checksum = _checksum(specs)
        tag = Tag.INPUTS_REST + (checksum & 0xFFFFFF)
        if self._rank == 0:
            in_order = [
                to_layout(tensor.detach(), order) for tensor, order in zip(tensors, _orders(specs, layout), strict=True)
            ]
            block = self._pack(specs, layout, max(num_bytes, head_bytes), in_order)
            on_device = any(devices.is_asynchronous(tensor.device) for tensor in in_order)
            ready = devices.record_event(self._device) if on_device else None
            self._relay(tag, block[:head_bytes], block[head_bytes:], ready)
            return [devices.to_device(tensor, self._device) for tensor in in_order]
        source = self._rank - 1
        head = self._transport.receive_bytes(head_bytes, source, Tag.INPUTS_HEAD + head_bytes, _WHAT)
        if int(head[:8].view(torch.int64)) != checksum:
            ranks = self._transport.ranks
            raise UsageError(
                f"rank {ranks[self._rank]} (pipeline rank {self._rank}) was given tensors {_shapes(specs) or 'none'}"
                f" for the step, and rank {ranks[0]} (pipeline rank 0) others",
                hint="feed every rank of a pipeline the same batches: shard data by smp.dp_rank(), not by smp.rank()",
            )
        rest = head[:0]
        if num_bytes > head_bytes:
            rest = self._transport.receive_bytes(num_bytes - head_bytes, source, tag, _WHAT)
        self._relay(tag, head, rest)
        # A copy, since the messages are still being sent to the next rank, and a step may change its inputs.
        packed = devices.host_memory(num_bytes - _CHECKSUM_BYTES, self._device)
        torch.cat([head[_CHECKSUM_BYTES:num_bytes], rest], out=packed)
        orders = _orders(specs, packed[: len(layout)].numpy().tobytes())
        arrived = unpack(packed[len(layout) :], specs)
        parts = zip(arrived, specs, orders, strict=True)
        return [
            as_layout(tensor, spec.shape, order).to(self._device, non_blocking=True) for tensor, spec, order in parts
        ]

    def end_step(self) -> None:
        """Note that a step has ended well: its messages have arrived, and all ranks know the size of the next head."""
        self.head_bytes = self._next_head_bytes
        frame, self._in_flight = self._in_flight, None
        self._frame = frame if frame is not None and len(frame.block) <= FIRST_BYTES else None

    def abandon(self) -> None:
        """Forget a step that an exception ended."""
        self.head_bytes = FIRST_BYTES
        self._frame = self._in_flight = None

    def _pack(
        self, specs: tuple[TensorSpec, ...], layout: bytes, num_bytes: int, tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the bytes that travel. Nobody may write to them before `end_step`: gloo reads them until then."""
        frame, self._frame = self._frame, None
        if frame is None or frame.specs != specs or len(frame.block) != num_bytes:
            frame = _new_frame(specs, layout, num_bytes, self._device)
        with torch.no_grad():
            for view, tensor in zip(frame.views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
        self._in_flight = frame
        return frame.block

    def _relay(self, tag: int, head: torch.Tensor, rest: torch.Tensor, ready: torch.Event | None = None) -> None:
        if self._rank < self._size - 1:
            self._transport.outbox.send(head, self._rank + 1, Tag.INPUTS_HEAD + len(head), ready)
            if len(rest):
                self._transport.outbox.send(rest, self._rank + 1, tag, ready)


def _new_frame(specs: tuple[TensorSpec, ...], layout: bytes, num_bytes: int, device: torch.device) -> _Frame:
    with torch.inference_mode(False):  # later steps outside that mode could not write to an inference tensor
        block = devices.host_memory(num_bytes, device).zero_()
        block[:8].view(torch.int64).fill_(_checksum(specs))
        begin = _CHECKSUM_BYTES + len(layout)
        block[_CHECKSUM_BYTES:begin].copy_(torch.tensor(list(layout), dtype=torch.uint8, device="cpu"))
        parts = unpack(block[begin : begin + packed_bytes(specs)], specs)
        laid_out = zip(parts, specs, _orders(specs, layout), strict=True)
        return _Frame(specs, block, [as_layout(part, spec.shape, order) for part, spec, order in laid_out])


@functools.lru_cache(maxsize=256)
def _layout(specs: tuple[TensorSpec, ...]) -> bytes:
    """Return the memory order of each tensor's dimensions, a byte for each dimension, padded for alignment."""
    orders = [dim for spec in specs for dim in spec.as_sent.order or range(len(spec.shape))]
    return bytes(orders) + bytes(-len(orders) % _CHECKSUM_BYTES)


@functools.lru_cache(maxsize=256)
def _orders(specs: tuple[TensorSpec, ...], layout: bytes) -> list[tuple[int, ...] | None]:
    """Return the memory order of each tensor's dimensions; None for the usual one."""
    orders, start = list[tuple[int, ...] | None](), 0
    for spec in specs:
        row_major = tuple(range(len(spec.shape)))
        order = tuple(layout[start : start + len(row_major)])
        orders.append(None if order == row_major else order)
        start += len(row_major)
    return orders


@functools.lru_cache(maxsize=256)
def _checksum(specs: tuple[TensorSpec, ...]) -> int:
    return zlib.crc32(_shapes(specs).encode())


def _shapes(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))
