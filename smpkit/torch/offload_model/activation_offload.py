"""Tensors at the boundaries of slices: offloaded to the host until they are needed again.

Each is on the device, on its way out, on the host, or on its way back. The device's tensor is kept until its copy is
complete; if more than `_IN_FLIGHT` copies are under way, the allocator waits for the oldest.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from smpkit.torch.offload.arena import Arena, Block
from smpkit.torch.offload.link import DONE, Event
from smpkit.torch.offload_model.counted_link import Transfers, flat_bytes, is_dense

__all__ = ["OffloadedTensor", "TensorOffloader"]

_IN_FLIGHT: Final = 2


class OffloadedTensor:
    """One tensor, and where it is.

    Args:
        tensor: on the device, or anywhere if it is the user's input, whose memory we must not free.
        requires_grad: whether it needs a gradient.
        is_input: whether it is the user's input.
        shared: the index of the user's input that it is, if every microbatch got that input whole.
    """

    __slots__ = (
        "block",
        "d2h_event",
        "device",
        "h2d_event",
        "meta",
        "offloader",
        "requires_grad",
        "shared",
        "user_input",
    )

    def __init__(
        self, tensor: Tensor, *, requires_grad: bool, is_input: bool = False, shared: int | None = None
    ) -> None:
        self.requires_grad = requires_grad
        self.shared = shared
        self.user_input = tensor if is_input else None
        self.device = None if is_input else tensor
        self.meta = torch.empty_like(tensor, device="meta")
        self.block: Block | None = None
        self.d2h_event: Event = DONE
        self.h2d_event: Event = DONE
        self.offloader: TensorOffloader | None = None

    def bytes(self) -> Tensor:
        """Return its memory on the host, as flat bytes."""
        assert self.block is not None, "it has not left"
        return self.block.memory[: self.meta.nbytes]

    def __del__(self) -> None:
        """Free the host's memory: a forward without a backward, or one that failed, has not released it."""
        offloader = getattr(self, "offloader", None)  # torch.compile and interrupts can leave it without attributes
        if offloader is not None:
            with contextlib.suppress(Exception):  # at exit, modules that it needs may be gone
                offloader.release(self)


class TensorOffloader:
    """Sends tensors out and brings them back.

    Args:
        device: where slices run.
        transfers: makes the copies.
        arena: host memory; when its budget is used up, tensors stay on the device. None: all stay.
    """

    def __init__(self, device: torch.device, transfers: Transfers, arena: Arena | None) -> None:
        self._device = device
        self._transfers = transfers
        self._arena = arena
        self._copies_to_host: deque[tuple[Event, Tensor]] = deque()

    def send(self, offloaded: OffloadedTensor, *, keep: bool) -> None:
        """Start to copy a tensor to the host.

        Args:
            offloaded: on the device.
            keep: leave it on the device, too, because it is needed there soon.
        """
        tensor, link = offloaded.device, self._transfers.link
        assert tensor is not None, "sent out twice"
        if self._arena is None:
            return
        offloaded.block, offloaded.offloader = self._arena.take(offloaded.meta.nbytes), self
        if offloaded.block is None:
            return
        dense = tensor if is_dense(tensor) else torch.empty_like(offloaded.meta, device=self._device).copy_(tensor)
        # After the block's earlier uses, too: copies to the host are made in order, and this stream has waited for
        # those to the device.
        offloaded.d2h_event = self._transfers.send(
            "boundaries_out", flat_bytes(dense), offloaded.bytes(), (link.now(), offloaded.block.after)
        )
        self._copies_to_host.append((offloaded.d2h_event, dense))
        if not keep:
            offloaded.device = None
        while self._copies_to_host and (len(self._copies_to_host) > _IN_FLIGHT or self._copies_to_host[0][0].done()):
            event, sent = self._copies_to_host[0]
            link.before_reuse(sent, event, link.stream())  # before the tensor is freed: the copy may still read it
            self._copies_to_host.popleft()

    def copy_input(self, inputs: Sequence[OffloadedTensor]) -> None:
        """Copy a user's input that is on the host to the arena, to be fetched from there like outputs of slices.

        If the arena has no room, each use copies from the user's memory and waits.

        Args:
            inputs: all that stand for the same tensor.
        """
        # After the model's call the user may overwrite that memory, while a queued copy or the backward still reads it.
        tensor = inputs[0].user_input
        if self._arena is None or tensor is None or tensor.device.type != "cpu" or self._device.type == "cpu":
            return
        block, meta = self._arena.take(tensor.nbytes), inputs[0].meta
        if block is None:
            return
        self._transfers.link.close()  # this thread writes: copies from and to that memory must have ended
        block.memory[: meta.nbytes].view(meta.dtype).as_strided(meta.shape, meta.stride()).copy_(tensor)
        for offloaded in inputs:
            offloaded.block, offloaded.offloader, offloaded.user_input = block, self, None

    def fetch(self, offloaded: OffloadedTensor) -> None:
        """Start to copy a tensor back to the device, if it is not there."""
        if offloaded.device is not None or offloaded.user_input is not None:
            return
        assert offloaded.block is not None, "neither on the device nor on the host"
        link, num_bytes = self._transfers.link, offloaded.meta.nbytes
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # `now`, after the allocation: work queued on this stream may still use the memory for what it held before.
        after = (link.now(), offloaded.d2h_event)
        offloaded.h2d_event = self._transfers.fetch("boundaries_in", offloaded.bytes(), flat, after)
        offloaded.block.last_read = offloaded.h2d_event
        offloaded.device = flat.view(offloaded.meta.dtype).as_strided(offloaded.meta.shape, offloaded.meta.stride())

    def take(self, offloaded: OffloadedTensor) -> Tensor:
        """Return the tensor on the device, ready to use; the offloader keeps only the host's copy, if there is one."""
        if offloaded.user_input is not None:
            return offloaded.user_input.to(self._device).detach()
        self.fetch(offloaded)
        tensor = offloaded.device
        assert tensor is not None
        self._transfers.link.wait(offloaded.h2d_event, "a slice's input")
        if offloaded.block is not None:
            offloaded.device = None
        return tensor.detach()

    def release(self, offloaded: OffloadedTensor) -> None:
        """Drop a tensor; its host memory goes back to the arena with the last that refers to it."""
        if offloaded.device is not None and not offloaded.h2d_event.done():
            # Fetched but never taken: no stream has waited for this copy, and its memory is freed here.
            self._transfers.link.synchronize(offloaded.h2d_event, "a slice's input")
        offloaded.block = offloaded.device = offloaded.offloader = None
