"""NCCL point-to-point channels: values and gradients travel between GPUs without a detour through the hosts.

NCCL has no tags: between two ranks it pairs sends and receives in the order in which they begin. And it does not
promise that two of its kernels run on a GPU at the same time: one that waits for its peer may keep every other from
running, and then ranks wait for each other in a circle. Two rules exclude that.

[Note: one order] Before a step runs, all ranks know in which order its messages travel, one order for the whole
pipeline (`message_order.py`). Each rank begins its own sends and receives in this order, and on its GPU each starts
when the one before has ended. So of all messages that have not ended, the first is the next one for both its ranks: no
NCCL kernel runs on their GPUs, and the compute that it waits for needs only messages before it, which have ended. So it
is next to end, then the one after it, and so on, whatever else waits.

It follows that an NCCL kernel may hold up everything else on a GPU, that one queue may serve all its streams, and that
a rank may wait for its whole GPU at any time, as allocations in the middle of a step do (cudaMalloc, cudaFree,
cudaHostRegister): no such wait needs what the waiting rank has not done yet. The order follows from the schedule, so
hosts do not wait for each other in a circle either: before what a rank sends there are only messages that other ranks
can send without it.

[Note: headers] When a send has begun, a header travels between the hosts, over gloo, with the message's tag and its
length. The receiver waits for it and begins the receive then: no kernel spins for a rank that is late or dead, and all
waiting for other ranks is waiting for headers, which has a deadline and knows the rank that it waits for. What a header
can say needs no message, such as that there is no gradient.

A rank reads the headers of all messages that come before the one that it sends or needs now. So most receives begin
long before their value is needed, and sends do not stay on the GPU for long. Nothing is polled: what a rank begins, and
between which of its own operations, depends on the schedule and not on how fast messages are. So ranks that do the same
work on other parts of the model (tensor parallelism) run their collectives between the same messages.

[Note: leaving] Where the order ends (a microbatch diverges from the recorded one, or the step is abandoned), a rank
sends a header `LEFT` to all ranks that it is connected to. Whoever reads it leaves as well, so all of them do. Each
receives what was sent before that header, so no kernel is left without a partner; the rest of the step travels through
the hosts.

A step that runs microbatch after microbatch, because its calls may change, follows the program, which is one order too.

The price: a message may wait for a late one that is due before it. The same happens where messages are exchanged in
fixed pairs, as in other pipelines. Hosts run ahead of their GPUs as far as the schedule lets them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from smpkit.torch.core import devices
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed.deadline import waiting


@dataclass(frozen=True, slots=True)
class PendingReceive:
    """A receive that has begun, and the memory that it writes to."""

    work: dist.Work
    block: Block


class P2PChannels:
    """The connections of one rank's GPU.

    Args:
        group: of the pipeline's ranks; nothing else may travel in it.
        ranks: their global ranks, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        backends.refuse_launch_order(device)
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._device = device
        self._connected: set[int] = set()
        # Messages run on this stream one after the other, beside compute: see [Note: one order].
        self._stream = devices.new_stream(device, high_priority=True)
        self.pool = ReceivePool(device)

    @property
    def peers(self) -> list[int]:
        return sorted(self._connected)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of the pipeline's ranks; all its ranks call this alike."""
        # NCCL makes a communicator for each pair at its first message, and both ranks wait for it. So connect all pairs
        # now, in an order that is the same on all ranks: at the first messages of a step, a rank could wait for one
        # peer, which waits for another, which waits for the first.
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
            if self._rank not in (low, high) or self.is_connected_to(low + high - self._rank):
                continue
            peer = low + high - self._rank
            with waiting("the connection of the GPUs", [self._ranks[peer]]):
                for receives in (self._rank == high, self._rank == low):
                    if receives:
                        self.discard(self.receive(1, peer))
                    else:
                        block = torch.zeros(1, dtype=torch.uint8, device=self._device)
                        self.send(block, peer)[0].wait()
            self._connected.add(peer)

    def is_connected_to(self, peer: int) -> bool:
        return peer in self._connected

    def send(self, tensor: torch.Tensor, target: int) -> tuple[dist.Work, torch.Tensor]:
        """Begin to send a tensor without gaps; return the work, and the bytes that must not change until it is done."""
        self.pool.sweep()
        # As bytes, since the receiver may not know the dtype yet. A lazy conjugate or negative has other bytes than its
        # values.
        block = tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8)
        is_ready = devices.record_event(self._device)
        with devices.on_stream(self._stream):
            devices.order_after(is_ready, self._stream)
            return self._order_next_after(self._group.send([block], target, 0)), block

    def receive(self, num_bytes: int, source: int) -> PendingReceive:
        """Begin to receive a message of `source`, whose header has arrived."""
        self.pool.sweep()
        block = self.pool.take(num_bytes)
        with devices.on_stream(self._stream):
            devices.order_after(block.free, self._stream)
            return PendingReceive(self._order_next_after(self._group.recv([block.memory], source, 0)), block)

    def received(self, pending: PendingReceive) -> torch.Tensor:
        """Return the bytes of a message; on a GPU the current stream waits for them, and the host does not."""
        pending.work.wait()  # with a timeout as argument, nccl would block the host
        return self.pool.lend(pending.block)

    def discard(self, pending: PendingReceive) -> None:
        """Drop a message that nobody needs."""
        pending.work.wait()
        self.pool.give_back(pending.block)

    def _order_next_after(self, work: dist.Work) -> dist.Work:
        """Make the next message on the stream wait for this one; a CPU has no streams."""
        if self._stream is not None:
            work.wait()
        return work


class Block:
    """Memory for one message."""

    __slots__ = ("free", "lent", "memory")

    def __init__(self, memory: torch.Tensor, free: torch.Event | None) -> None:
        self.memory = memory
        self.free = free
        """The event on the device after its last use."""
        self.lent: torch.UntypedStorage | None = None

    @property
    def is_unused(self) -> bool:
        """Whether no tensor uses the storage that was lent."""
        # `lent` itself counts as one use.
        return self.lent is None or bool(torch._C._storage_Use_Count(self.lent._cdata) <= 1)


class ReceivePool:
    """The memory that messages arrive in on a GPU, reused in the order in which it becomes free.

    Nobody can know how long a received value is needed: its graph saves it, the user's code keeps it. So a block is
    lent as a storage of its own, and is free when no tensor uses that storage any more. By then its last use has been
    queued on the GPU: an event is recorded, and the next message waits for it there, not on the host. (Torch's own way,
    `record_stream`, gives memory back when the GPU happens to have got there: memory use would depend on chance.)

    There are as many blocks as the timetable says (`message_order._blocks`). Where values live longer, one more is made
    and kept. A block that the user keeps beyond the step is given up, and replaced when the next step begins. The
    memory belongs to the stream that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wanted: dict[int, int] = {}
        """How many blocks there are, by size in bytes."""
        self._needed: frozenset[int] = frozenset()
        """The sizes of the latest step."""
        self._free: dict[int, deque[Block]] = {}
        self._lent: list[Block] = []
        self.num_unplanned = 0
        """Messages for which there was no block: memory was allocated while a step ran."""

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(size * count for size, count in self._wanted.items())

    def fit(self, needs: Mapping[int, int]) -> None:
        """Make as many blocks as a step needs, by size in bytes, before it begins; free sizes unused for two steps."""
        self.sweep()
        self._lent.clear()  # blocks that are still lent now belong to the tensors that use them
        known = self._needed | needs.keys()
        self._wanted = {size: max(needs.get(size, 0), self._wanted.get(size, 0)) for size in sorted(known)}
        self._needed = frozenset(needs)
        self._free = {size: self._free.get(size, deque()) for size in self._wanted}
        for size, free in self._free.items():
            free += [self._made(size) for _ in range(self._wanted[size] - len(free))]

    def take(self, num_bytes: int) -> Block:
        free = self._free.get(num_bytes)
        if free is None:  # a size that the timetable does not have
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
        """Return a block as a tensor of bytes; the block comes back when no tensor uses its memory."""
        # Through DLPack the tensor has a storage of its own, whose uses can be counted.
        data: torch.Tensor = from_dlpack(torch._C._to_dlpack(block.memory))
        if block.memory.nbytes in self._free:
            block.lent = data.untyped_storage()
            self._lent.append(block)
        return data

    def give_back(self, block: Block) -> None:
        """Take back a block that was never lent; its next message follows this one on the same stream."""
        if (free := self._free.get(block.memory.nbytes)) is not None:
            free.append(block)

    def sweep(self) -> None:
        """Take back the blocks that no tensor uses any more."""
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
