"""Tensors at the borders of slices: parked on the host until they are needed again.

A parked tensor is on the device, on its way out, on the host, or on its way back. The device's tensor is kept until its
copy has ended, at most `_IN_FLIGHT` at a time: memory of older ones is given up only after their copies.
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
from smpkit.torch.offload_model.transfers import Transfers, flat_bytes, is_dense

__all__ = ["Parked", "Parking"]

_IN_FLIGHT: Final = 2


class Parked:
    """One tensor, and where it is.

    Args:
        tensor: on the device, or anywhere if it is the user's input: that is never ours to free.
        requires_grad: whether a gradient is wanted for it.
        is_input: whether it is the user's input.
        shared: which of the user's inputs it is, where every microbatch got that whole.
    """

    __slots__ = ("back", "block", "device", "home", "origin", "out", "pattern", "requires_grad", "shared")

    def __init__(
        self, tensor: Tensor, *, requires_grad: bool, is_input: bool = False, shared: int | None = None
    ) -> None:
        self.requires_grad = requires_grad
        self.shared = shared
        self.origin = tensor if is_input else None
        self.device = None if is_input else tensor
        self.pattern = torch.empty_like(tensor, device="meta")
        self.block: Block | None = None
        self.out: Event = DONE
        self.back: Event = DONE
        self.home: Parking | None = None

    def __del__(self) -> None:
        """Give up the host's memory: a forward that no backward follows, or one that failed, releases nothing."""
        home = getattr(self, "home", None)  # torch.compile, and interrupts, leave some half made
        if home is not None:
            with contextlib.suppress(Exception):  # at the end of the interpreter, what is needed may be gone
                home.release(self)


class Parking:
    """Sends tensors out and brings them back.

    Args:
        device: where they are computed with.
        transfers: how they get there.
        arena: where they are on the host; when its budget is spent they stay on the device. None: they all do.
    """

    def __init__(self, device: torch.device, transfers: Transfers, arena: Arena | None) -> None:
        self._device = device
        self._transfers = transfers
        self._arena = arena
        self._leaving: deque[tuple[Event, Tensor]] = deque()

    def send(self, parked: Parked, *, keep: bool) -> None:
        """Start to copy a tensor to the host.

        Args:
            parked: on the device.
            keep: leave it on the device too: it is needed there at once.
        """
        tensor, link = parked.device, self._transfers.link
        assert tensor is not None, "sent out twice"
        if self._arena is None:
            return
        parked.block, parked.home = self._arena.take(parked.pattern.nbytes), self
        if parked.block is None:
            return
        parked.block.num_users, parked.block.last_uses = 1, []
        dense = tensor if is_dense(tensor) else torch.empty_like(parked.pattern, device=self._device).copy_(tensor)
        after = (link.now(), *parked.block.free_after)
        what = "a slice's output"
        parked.out = self._transfers.send("boundaries_out", flat_bytes(dense), parked.block.bytes, after, what)
        self._leaving.append((parked.out, dense))
        if not keep:
            parked.device = None
        while self._leaving and (len(self._leaving) > _IN_FLIGHT or self._leaving[0][0].done()):
            event, _ = self._leaving[0]
            link.before_reuse(event, link.stream())  # only now may the memory go to somebody else
            self._leaving.popleft()

    def take_over(self, inputs: Sequence[Parked]) -> None:
        """Copy a user's input that is on the host, from where it is fetched like what slices return.

        Once the model has been called the user may fill that memory anew; a copy from it, or the backward that reads it
        again, would come too late. What finds no room is copied from the user's memory, and waited for, each time.

        Args:
            inputs: all of one tensor.
        """
        tensor = inputs[0].origin
        if self._arena is None or tensor is None or tensor.device.type != "cpu" or self._device.type == "cpu":
            return
        block, pattern = self._arena.take(tensor.nbytes), inputs[0].pattern
        if block is None:
            return
        for event in block.free_after:
            self._transfers.link.settle(event, "an input of the model")
        block.num_users, block.last_uses = len(inputs), []
        block.bytes.view(pattern.dtype).as_strided(pattern.shape, pattern.stride()).copy_(tensor)
        for parked in inputs:
            parked.block, parked.home, parked.origin = block, self, None

    def fetch(self, parked: Parked) -> None:
        """Start to bring a tensor back to the device, if it is not there."""
        if parked.device is not None or parked.origin is not None:
            return
        assert parked.block is not None, "neither on the device nor on the host"
        link, num_bytes = self._transfers.link, parked.pattern.nbytes
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # The memory may have been somebody else's on this stream a moment ago: `now` comes before the copy.
        after = (link.now(), parked.out)
        parked.back = self._transfers.fetch("boundaries_in", parked.block.bytes, flat, after, "a slice's input")
        parked.device = flat.view(parked.pattern.dtype).as_strided(parked.pattern.shape, parked.pattern.stride())

    def take(self, parked: Parked) -> Tensor:
        """Return the tensor on the device, to be computed with from now on; only the host keeps it, if it is there."""
        if parked.origin is not None:
            return parked.origin.to(self._device).detach()
        self.fetch(parked)
        tensor = parked.device
        assert tensor is not None
        self._transfers.link.wait(parked.back, "a slice's input")
        if parked.block is not None:
            parked.device = None
        return tensor.detach()

    def release(self, parked: Parked) -> None:
        """Forget a tensor; its memory on the host is used again after the last copy from and to it."""
        if parked.device is not None and not parked.back.done():
            self._transfers.link.settle(parked.back, "a slice's input")  # nobody waited for it, and it is overwritten
        block = parked.block
        if self._arena is not None and block is not None:
            block.last_uses += [event for event in (parked.out, parked.back) if not event.done()]
            block.num_users -= 1
            if not block.num_users:
                self._arena.give(block, block.last_uses)
        parked.block = parked.device = parked.home = None
