"""Send values and gradients between the ranks of one pipeline.

They travel from GPU to GPU where nccl connects the two (`GpuLink`), else through the hosts (`host_link.py`), as all
other messages do.

nccl has no tags: in one direction between two ranks it pairs sends and receives in the order in which they begin.

[Note: headers] When a send has begun, a header travels between the hosts, over gloo, with the message's tag and its
length. A rank that needs a message reads the headers of its sender, in their order, and begins a receive for each,
until its own is there. So sends and receives pair up whatever order the schedule has, no kernel spins for a rank that
is late or dead, and all waiting for other ranks is waiting for headers, which has a deadline and knows the rank that it
waits for. What a header can say needs no message, such as that there is no gradient. It also says how many messages
of the other rank this one has begun to receive: the other lets go of those, so memory does not depend on chance.

[Note: two groups] Messages to higher ranks travel in one group, those to lower ranks in another: each direction between
two ranks has a communicator and a stream of its own. A send waits on its GPU for compute, for the sends before it in
the same direction, and for its receive. A receive waits for those before it, and for what was queued when its memory
was made. So whatever an operation waits for was begun earlier on some host, and there is no circle, as long as kernels
of several streams run side by side (`backends.refuse_one_queue`). This does not hold if a host waits for its whole GPU
in the middle of a step: a send that is pending there may need a receive that another rank begins only after a later
message of this one.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.devices import backends
from smpkit.torch.core.tensor_spec import as_bytes, permute_to_memory, version_of
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.pipeline.host_link import HostLink, SentTensor
from smpkit.torch.pipeline.messages import Message, P2PTransfer, Tag, laid_out

MessageRecorder = Callable[[str, int, int, int, int, int], object]
"""Called with `(direction, peer, num_bytes, tag, start_ns, end_ns)`.

`direction` is "send" or "receive", `peer` a pp_rank, `tag` the same on both ends and in every step. A send lasts as
long as it kept its caller from other work, a receive from when its data was needed until it was there; times are
`time.perf_counter_ns()`.
"""

_TEXT_BYTES: Final = 256
"""Of the text of a spec that is announced."""


class Transport:
    """One rank's end of the pipeline's connections.

    Args:
        group, ranks: see `HostLink`.
        between_gpus: groups for messages from GPU to GPU, to higher ranks and to lower ones; None: values go through
            the hosts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: torch.device,
        between_gpus: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    ) -> None:
        self._device = device
        self.hosts = HostLink(group, ranks, device)
        self.gpus = None if between_gpus is None else GpuLink(*between_gpus, self.hosts, group.rank(), device)
        self.links: list[GpuLink | HostLink] = [self.hosts] * len(ranks)
        """By pp_rank, what connects this rank with it."""
        self.recorder: MessageRecorder | None = None
        """Called for every value and gradient that is sent or received; None costs nothing."""

    def connect(self, transfers: Iterable[P2PTransfer]) -> None:
        """Connect the GPUs between which values travel; all ranks call this with the same transfers."""
        if self.gpus is not None:
            self.gpus.connect([(transfer.source, transfer.target) for transfer in transfers])
            for peer in self.gpus.peers:
                self.links[peer] = self.gpus

    def send(self, tensor: torch.Tensor | None, message: Message, *, copy: bool = False) -> None:
        """Send a value (an activation), or its gradient back; do not wait until it has arrived.

        Args:
            tensor: None: the value has no gradient.
            copy: it may be changed in place before it has arrived.
        """
        if tensor is not None:
            if message.transfer.spec.order is not None:
                tensor = permute_to_memory(tensor, message.transfer.spec.order)
            # From a GPU through the hosts, a copy travels anyway.
            if copy and (self._device.type == "cpu" or self.gpus is not None):
                tensor = tensor.clone(memory_format=torch.contiguous_format)
        start_ns = 0 if self.recorder is None else time.perf_counter_ns()
        self.links[message.receiver].send(tensor, message)
        if self.recorder is not None:
            num_bytes = 0 if tensor is None else tensor.nbytes
            tag = self.hosts.tag_of(message)
            self.recorder("send", message.receiver, num_bytes, tag, start_ns, time.perf_counter_ns())

    def receive(self, message: Message) -> torch.Tensor | None:
        """Return a value or gradient that another rank sends; None: the value has no gradient."""
        start_ns = 0 if self.recorder is None else time.perf_counter_ns()
        link = self.links[message.sender]
        value = link.receive(message)
        if self.recorder is not None:
            num_bytes = message.transfer.spec.num_bytes
            if link is self.gpus:
                devices.wait_for_stream(self._device)  # so that the wait is timed apart from compute
                num_bytes = 0 if value is None else num_bytes  # None is a header without a message
            tag = self.hosts.tag_of(message)
            self.recorder("receive", message.sender, num_bytes, tag, start_ns, time.perf_counter_ns())
        return value

    def announce(self, message: Message) -> None:
        """Tell the receiver which value `send` will send next; without a record, it may expect one of another size.

        Gloo ends the process if a message is longer than its receive, and says nothing if it is shorter.
        """
        text = f"{message.transfer.spec.text:{_TEXT_BYTES}.{_TEXT_BYTES}}".encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.hosts.send_bytes(data, message.receiver, self.hosts.tag_of(message), message)

    def announced(self, message: Message) -> str:
        """Return the text of the spec that the sender has announced."""
        text = self.hosts.receive_bytes(_TEXT_BYTES, message.sender, self.hosts.tag_of(message), message)
        return bytes(text.tolist()).decode().rstrip()

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived."""
        if self.gpus is not None:
            self.gpus.end_step()
        self.hosts.flush()


# ---- from GPU to GPU -------------------------------------------------------------------------------------------------

_END: Final = -1
"""In a header, instead of a tag: nothing more comes from this rank in this step."""
_NO_GRADIENT: Final = -1
"""In a header, instead of a number of bytes: the gradient is None. (Values without elements always have a gradient.)"""

_Memory = tuple[torch.Tensor, torch.Event | None]
"""Bytes for a message, and the event on the device after which nothing else uses them."""
_Arrival = tuple[dist.Work, torch.Tensor]
"""A receive that has begun, and the bytes that it writes to."""


class GpuLink:
    """One rank's GPU, connected with those of others.

    Args:
        up: a group of the pipeline's ranks for messages to higher ranks; nothing else travels in it.
        down: another one, for those to lower ranks.
        hosts: brings the headers of messages.
        rank: this pp_rank.
        device: this rank's.
    """

    def __init__(
        self, up: dist.ProcessGroup, down: dist.ProcessGroup, hosts: HostLink, rank: int, device: torch.device
    ) -> None:
        backends.refuse_one_queue(device)
        self._up, self._down = up, down
        self._hosts = hosts
        self._rank = rank
        self._device = device
        self.peers: set[int] = set()
        """The ranks that messages here travel to and from."""
        self._stream = devices.new_stream(device, high_priority=True)
        """Receives are begun on it: they wait until their memory is free, and not for all compute that is queued."""
        self._memory: dict[int, _Memory] = {}
        """By tag, for messages whose header has not come."""
        self._arrivals: dict[int, _Arrival | None] = {}
        """By tag, messages whose header has come and that nobody has taken; None where the header says it all."""
        self._num_received: Counter[int] = Counter()
        """By peer, how many receives have begun."""
        self._sent: defaultdict[int, deque[SentTensor]] = defaultdict(deque)
        """By peer, messages whose receive is not known to have begun."""
        self._num_released: Counter[int] = Counter()
        """By peer, how many messages have been let go of, in the order of the sends."""

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect pairs of the pipeline's ranks; all its ranks call this alike.

        Raises:
            DeadlineError: another rank did not come.
            RemoteError: another rank failed.
        """
        # nccl makes a communicator for each pair at its first message, and both ranks wait for it. So connect all pairs
        # now, in an order that is the same on all ranks: at the first messages of a step, a rank could wait for one
        # peer, which waits for another, which waits for the first.
        for pair in sorted({(min(pair), max(pair)) for pair in pairs}):
            if self._rank not in pair or (peer := sum(pair) - self._rank) in self.peers:
                continue
            with waiting("the connection of the GPUs", [self._hosts.ranks[peer]]):
                for sends in (self._rank < peer, self._rank > peer):
                    if sends:
                        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
                        self._group(self._rank, peer).send([byte], peer, 0).wait()
                    else:
                        _take(self._begin_receive(self._new_memory(1), peer))
            self.peers.add(peer)

    def send(self, tensor: torch.Tensor | None, message: Message) -> None:
        """Send a value or gradient, None as a header alone."""
        target = message.receiver
        num_bytes = _NO_GRADIENT if tensor is None else tensor.nbytes
        if tensor is not None and num_bytes:
            # As bytes, since the receiver may not know the dtype yet. A lazy conjugate or negative has other bytes than
            # its values.
            data = as_bytes(tensor.contiguous().resolve_conj().resolve_neg())
            work = self._group(self._rank, target).send([data], target, 0)
            self._sent[target].append(SentTensor(work, data, version_of(data), target, message))
        self._send_header(self._hosts.tag_of(message), num_bytes, target, message)

    def post(self, message: Message) -> None:
        """Make the memory for a message now, so that its receive need not wait for compute that is queued later."""
        if (tag := self._hosts.tag_of(message)) not in self._arrivals:
            self._memory[tag] = self._new_memory(message.transfer.spec.num_bytes)

    def receive(self, message: Message) -> torch.Tensor | None:
        """Return a value or gradient, for which the current stream waits."""
        spec, tag = message.transfer.spec, self._hosts.tag_of(message)
        while tag not in self._arrivals:
            if not self._read_header(message.sender, message):
                raise UsageError(
                    f"pipeline rank {message.sender} has ended the step and not sent {message}",
                    hint="the ranks of a pipeline run the same step, with the same configuration",
                )
        arrival = self._arrivals.pop(tag)
        if arrival is None:
            if spec.num_bytes:
                return None
            return laid_out(torch.empty(spec.shape, dtype=spec.dtype, device=self._device), spec)
        data = _take(arrival)
        return laid_out(data.view(spec.dtype).view(spec.shape).detach(), spec)

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived."""
        for peer in sorted(self.peers):
            self._send_header(_END, 0, peer, _end_of(peer))
        # A microbatch that took another way than the recorded one leaves messages that nobody needs; receive them, too.
        for peer in sorted(self.peers):
            while self._read_header(peer, _end_of(peer)):
                pass
        self._hosts.flush()  # whoever has taken a header has begun to receive
        for peer in sorted(self.peers):
            self._release(peer, self._num_released[peer] + len(self._sent[peer]))
        for arrival in self._arrivals.values():
            if arrival is not None:
                _take(arrival)
        self._arrivals.clear()
        self._memory.clear()

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._up if source < target else self._down

    def _send_header(self, tag: int, num_bytes: int, target: int, what: Message | str) -> None:
        header = torch.tensor([tag, num_bytes, self._num_received[target]], device="cpu")
        self._hosts.send_bytes(header, target, Tag.HEADERS, what)

    def _read_header(self, source: int, what: Message | str) -> bool:
        """Begin the next receive from a rank; return False if nothing more comes from it in this step."""
        header = self._hosts.receive_bytes(24, source, Tag.HEADERS, what).view(torch.int64)
        tag, num_bytes, num_received = header.tolist()
        self._release(source, num_received)
        if tag == _END:
            return False
        memory = self._memory.pop(tag, None)
        self._arrivals[tag] = None
        if num_bytes > 0:
            if memory is None or memory[0].nbytes != num_bytes:
                memory = self._new_memory(num_bytes)
            self._arrivals[tag] = self._begin_receive(memory, source)
            self._num_received[source] += 1
        return True

    def _release(self, target: int, num_received: int) -> None:
        """Let go of what a rank has begun to receive; the current stream waits for it."""
        while self._num_released[target] < num_received:
            self._num_released[target] += 1
            sent = self._sent[target].popleft()
            sent.work.wait()
            sent.refuse_change()

    def _new_memory(self, num_bytes: int) -> _Memory:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device), devices.record_event(self._device)

    def _begin_receive(self, memory: _Memory, source: int) -> _Arrival:
        data, is_free = memory
        with devices.on_stream(self._stream):
            devices.order_after(is_free, self._stream)
            return self._group(source, self._rank).recv([data], source, 0), data


def _take(arrival: _Arrival) -> torch.Tensor:
    """Let the current stream wait for a message, and return its bytes."""
    work, data = arrival
    work.wait()  # with a timeout as argument, nccl would block the host
    return data


def _end_of(peer: int) -> str:
    return f"the end of the step on pipeline rank {peer}"
