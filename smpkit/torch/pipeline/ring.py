"""Memory on the GPU that messages arrive in, used again and again, in the order in which it comes free.

Nobody can know how long a received value is needed: its graph saves it, the user's code keeps it. So a block is lent as
a storage of its own, and is free when no tensor uses that any more. Then its last use has been queued on the GPU, so an
event is recorded, and the next message waits for it there, not the host. (`record_stream`, torch's own way, gives
memory back when the GPU has happened to get there: how much is in use would depend on chance.)

There are as many blocks as the timetable says (`timetable._blocks`). Where values live longer, one more is made and
stays; what the user keeps beyond the step is his, and replaced when the next one begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch.utils.dlpack import from_dlpack

from smpkit.torch import devices

__all__ = ["Block", "ReceivePool"]


class Block:
    """Memory for one message."""

    __slots__ = ("free", "lent", "memory")

    def __init__(self, memory: torch.Tensor, free: torch.Event | None) -> None:
        self.memory = memory
        self.free = free
        """When, on the device, whoever used it is done."""
        self.lent: torch.UntypedStorage | None = None

    @property
    def is_unused(self) -> bool:
        """Whether no tensor uses what was lent."""
        # One is counted for `lent` itself.
        return self.lent is None or bool(torch._C._storage_Use_Count(self.lent._cdata) <= 1)


class ReceivePool:
    """The memory of one rank's received messages.

    Args:
        device: where it lies; it belongs to the stream that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wanted: dict[int, int] = {}
        """By size in bytes, how many blocks there are."""
        self._needed: frozenset[int] = frozenset()
        """The sizes of the latest step."""
        self._free: dict[int, deque[Block]] = {}
        self._lent: list[Block] = []
        self.num_unplanned = 0
        """Messages for which there was no block."""

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(size * count for size, count in self._wanted.items())

    def fit(self, needs: Mapping[int, int]) -> None:
        """Have as many blocks of each size as a step needs, before it begins; give up those of two steps ago.

        What is lent still belongs to whoever keeps it.
        """
        self.sweep()
        self._lent.clear()
        known = self._needed | needs.keys()
        self._wanted = {size: max(needs.get(size, 0), self._wanted.get(size, 0)) for size in sorted(known)}
        self._needed = frozenset(needs)
        self._free = {size: self._free.get(size, deque()) for size in self._wanted}
        for size, free in self._free.items():
            free += [self._made(size) for _ in range(self._wanted[size] - len(free))]

    def take(self, num_bytes: int) -> Block:
        """Return memory for a message."""
        free = self._free.get(num_bytes)
        if free is None:  # of a size that was not foreseen
            self.num_unplanned += 1
            return self._made(num_bytes)
        if not free:
            self.sweep()
        if free:
            return free.popleft()
        self.num_unplanned += 1
        self._wanted[num_bytes] += 1
        return self._made(num_bytes)

    def lend(self, block: Block) -> torch.Tensor:
        """Return the bytes that have come, as a tensor; its memory comes back when nobody uses it."""
        data: torch.Tensor = from_dlpack(torch._C._to_dlpack(block.memory))
        if block.memory.nbytes in self._free:
            block.lent = data.untyped_storage()
            self._lent.append(block)
        return data

    def give_back(self, block: Block) -> None:
        """Take back a block that was never lent; its next message follows this one on the stream of both."""
        if (free := self._free.get(block.memory.nbytes)) is not None:
            free.append(block)

    def sweep(self) -> None:
        """Take back what is in nobody's use any more."""
        dead = [block for block in self._lent if block.is_unused]
        if not dead:
            return
        free = devices.record_event(self._device)
        for block in dead:
            block.lent, block.free = None, free
            self._free[block.memory.nbytes].append(block)
        self._lent = [block for block in self._lent if block.lent is not None]

    def _made(self, num_bytes: int) -> Block:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return Block(memory, devices.record_event(self._device))
