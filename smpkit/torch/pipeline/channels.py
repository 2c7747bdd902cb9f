"""Memory on the GPU that messages arrive in, used again and again, in the order in which it comes free.

Nobody can know how long a received value is needed: its graph saves it, the user's code keeps it. So a block is lent as
a storage of its own, and is free when no tensor uses that any more. Then its last use has been queued on the GPU, so an
event is recorded, and the next message waits for it there, not the host. (`record_stream`, torch's own way, gives
memory back when the GPU has happened to get there: how much is in use would depend on chance.)

There are as many blocks as the timetable says (`timetable._blocks`). Where values live longer, one more is made and
stays; what the user keeps beyond the step is his, and replaced when the next one begins.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.distributed.deadline import waiting

__all__ = ["Block", "P2PChannels", "PendingReceive", "ReceivePool", "has_channels"]


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


# --- NCCL point-to-point channels: values and gradients travel between GPUs without a detour through the hosts --------
# nccl has no tags: between two ranks it pairs sends and receives in the order in which they are begun. And it does not
# promise that two of its kernels run on a GPU at the same time: one that waits for its peer may keep the GPU from every
# other, and then ranks wait for each other in a circle. Two rules exclude that.
#
# *One order.* Before a step runs, all ranks know in which order its messages travel, one order for the whole pipeline
# (`timetable.py`). Each rank begins its own sends and receives in this order, and on its GPU each starts when the one
# before is over. So of all messages that are not over, the first is the next one for both its ranks: nothing of nccl's
# runs on their GPUs, and what it waits for of what they compute needs only messages before it, which are over. So it is
# next to end, then the one after it, and so on, whatever else waits. It follows that a kernel of nccl may hold up
# everything else on a GPU, that one queue may serve all its streams, and that a rank may wait for its whole GPU at any
# time, as memory that is allocated in the middle of a step (cudaMalloc, cudaFree, cudaHostRegister) makes it do: no
# such wait needs what the rank that waits has not done yet. The order is that of the schedule, so hosts do not wait for
# each other in a circle either: before what a rank sends there are only messages that other ranks can send without it.
#
# *A word before each message.* A header travels between the hosts, over gloo, when a send has been begun, and says
# which message follows and how long it is. The receiver waits for it and begins the receive then: no kernel spins for a
# rank that is late or dead, and all waiting for other ranks is waiting for headers, which has a deadline and knows whom
# for. What a header can say needs no message, such as that there is no gradient. A rank reads the headers of all
# messages that come before the one that it sends or needs now. So a receive most often begins long before its value is
# needed, and a send does not stand on the GPU for long. Nothing is polled: what a rank begins, and between which of its
# own operations, depends on the schedule and not on how fast messages are. So ranks that do the same work on other
# parts of the model (tensor parallelism) also have their collectives between the same messages.
#
# *Leaving.* Where the order ends (a microbatch diverges from the recorded one, or the step is given up), a rank tells
# all that it is connected with by a header, `LEFT`. Whoever reads it leaves as well, so all of them do. Each receives
# what was sent before the word, so no kernel is left without a partner; what is left of the step travels through the
# hosts.
#
# A step that runs microbatch after microbatch, because its calls may change, follows the program, which is one order
# too.
#
# The price: a message may wait for one that is due before it and late. It is the same where messages are exchanged in
# fixed pairs, as in other pipelines. Hosts run ahead of their GPUs as far as the schedule lets them.
#
# nccl makes a communicator for each pair of ranks in the group, and both wait until it is made. So that is done at
# once, pair by pair in an order that is the same on all ranks: at the first messages, a rank could wait for one peer,
# which waits for another, which waits for the first.


_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def has_channels(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether nccl connects the ranks of a pipeline. It does not where several ranks share a GPU."""
    return device.type == "cuda" and "cuda:nccl" in str(dist.get_backend_config(group))


def refuse_launch_order() -> None:
    """Raise if nccl is told to start its kernels in the order of the calls, over all communicators of a GPU.

    Raises:
        UsageError: it is.
    """
    value = os.environ.get(_LAUNCH_ORDER, "0")
    if value != "0":
        raise UsageError(
            f"{_LAUNCH_ORDER} is {value!r}: every operation of nccl would wait for all that its GPU was given before,"
            " in whichever communicator, and replicas of a pipeline, whose schedules may differ, could wait for each"
            " other for ever",
            hint=f"unset {_LAUNCH_ORDER}: smpkit keeps messages of a pipeline in an order that cannot deadlock",
        )


@dataclass(frozen=True, slots=True)
class PendingReceive:
    """A message that is on its way to this rank."""

    work: dist.Work
    block: Block


class P2PChannels:
    """The connections of one rank's GPU.

    Args:
        group: the pipeline's ranks; nothing else travels in it.
        ranks: the pipeline's ranks, as global ones.
        rank: which of them this is.
        device: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, device: torch.device) -> None:
        if device.type == "cuda":
            refuse_launch_order()
        self._group = group
        self._ranks = ranks
        self._rank = rank
        self._device = device
        self._connected: set[int] = set()
        # What is given to this stream runs one after the other, beside what is computed.
        self._stream = devices.new_stream(device, high_priority=True)
        self.pool = ReceivePool(device)

    @property
    def peers(self) -> list[int]:
        """The ranks that this one is connected with."""
        return sorted(self._connected)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of the pipeline's ranks; all its ranks call this alike.

        Raises:
            DeadlineError: another rank did not come.
            RemoteError: another rank failed.
        """
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
        """Return whether this rank has a channel to another."""
        return peer in self._connected

    def begin_step(self, blocks: Mapping[int, int]) -> None:
        """Have the memory that messages of a step arrive in: by size in bytes, how many blocks."""
        self.pool.fit(blocks)

    def send(self, tensor: torch.Tensor, target: int) -> tuple[dist.Work, torch.Tensor]:
        """Begin to send a tensor without gaps; return the work, and what must stay as it is until that is done."""
        self.pool.sweep()
        # As bytes: who receives them may not know yet what they are. Those of a conjugate are not what they look like.
        block = tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8)
        made = devices.record_event(self._device)
        with devices.on_stream(self._stream):
            devices.order_after(made, self._stream)
            return self._order_next_after(self._group.send([block], target, 0)), block

    def receive(self, num_bytes: int, source: int) -> PendingReceive:
        """Begin to receive what `source` has begun to send, or is about to."""
        self.pool.sweep()
        block = self.pool.take(num_bytes)
        with devices.on_stream(self._stream):
            devices.order_after(block.free, self._stream)
            return PendingReceive(self._order_next_after(self._group.recv([block.memory], source, 0)), block)

    def received(self, pending: PendingReceive) -> torch.Tensor:
        """Let what is computed from now on wait for a message; return its bytes. On a GPU this does not wait itself."""
        pending.work.wait()  # with a deadline, nccl would hold up the host until then
        return self.pool.lend(pending.block)

    def discard(self, pending: PendingReceive) -> None:
        """Let go of a message that nobody needs."""
        pending.work.wait()
        self.pool.give_back(pending.block)

    def _order_next_after(self, work: dist.Work) -> dist.Work:
        """Make the next message wait for this one on the stream; without streams there is nothing to order."""
        if self._stream is not None:
            work.wait()
        return work
