"""Send values and gradients between the ranks of one pipeline.

Messages take one of two ways. Through the hosts (gloo), a tag of microbatch, transfer and direction is all that a
message needs, since all ranks number the transfers of a microbatch alike: no headers, no shapes, no handshakes. Between
GPUs that nccl connects, values and gradients take channels, which need one order and headers: see `channels.py`.
Compute never waits for a send; receives may be posted before they are needed.

[Note: releasing sent tensors] gloo reads a tensor from another thread until the receiver has it, and cannot be asked
whether it is done; waiting for it could wait for a rank that waits for us. But whoever receives a message from a rank
knows what that rank has done before it sent it: everything earlier in its list of actions, hence all receives of those.
So each receive releases the sends to that rank that it must have taken before, without waiting for anything.
"""

from __future__ import annotations

import logging
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import TensorSpec, as_layout, permute_to_memory, version_of
from smpkit.torch.core.tree import pickled
from smpkit.torch.distributed.deadline import explain_error
from smpkit.torch.pipeline.message_order import TRANSFERS_PER_MICROBATCH
from smpkit.torch.pipeline.messages import (
    LEFT,
    NO_GRADIENT,
    Message,
    MessageLabel,
    SentMessage,
    Tag,
    describe_message,
    is_none_gradient,
    none_gradient_message,
)

if TYPE_CHECKING:
    from smpkit.torch.pipeline.channels import P2PChannels, PendingReceive
    from smpkit.torch.pipeline.message_order import P2PTransfer, Timetable

__all__ = ["HostBuffers", "MessageKey", "MessageRecorder", "Outbox", "Transport"]

_log = logging.getLogger("smpkit")

MessageRecorder = Callable[[str, int, int, int, int, int], object]
"""Called with `(direction, peer, num_bytes, tag, start_ns, end_ns)`.

`direction` is "send" or "receive", `peer` a pp_rank, `tag` the same on both ends and in every step. A send lasts as
long as it kept its caller from other work, a receive from when its data was needed until it was there; times are
`time.perf_counter_ns()`.
"""

Use = Callable[[torch.Tensor], torch.Tensor]

MessageKey = tuple[int, int, bool]
"""A microbatch, the number of a transfer, and whether it is its gradient."""

_NOBODY_KNOWS: Final = 1 << 62
"""Instead of the index of the action that takes a message."""
_END: Final = "the end of a step that left its schedule"
_LAST_FIRST_TAG: Final = (1 << 30) - (1 << 28)
"""Tags of messages are smaller than those of `Tag`; a step may have 4,096 microbatches."""
_TEXT_BYTES: Final = 256
"""Of the text of a spec that is announced."""
_SMALLEST_BYTES: Final = 256 * 1024
"""Below that, memory comes from what the process has at hand anyway."""


def _usable(received: torch.Tensor, spec: TensorSpec, use: Use | None) -> torch.Tensor:
    """Return a received tensor with the memory layout that it had on the sender, after `use`."""
    if spec.order is not None:
        # Detach it: autograd treats in-place changes of a view differently, and this would be a view of the buffer.
        received = as_layout(received, spec.shape, spec.order, spec.stride).detach()
    return received if use is None else use(received)


class Transport:
    """One rank's end of the pipeline's connections.

    Args:
        group: the pipeline's ranks (PP_GROUP), for CPU tensors.
        ranks: their global ranks, for messages.
        device: where values live.
        channels: NCCL channels from GPU to GPU; values of ranks that none connects go through the hosts.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device, channels: P2PChannels | None = None
    ) -> None:
        self._group = group
        self.ranks = list(ranks)
        """The ranks of the job by pp_rank."""
        self._rank = group.rank()
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._channels = channels
        self._begun_receives: dict[int, PendingReceive | None] = {}
        """By tag, receives on channels that have begun; None where the header says it all."""
        self._positions: dict[int, int] | None = None
        """By tag, a message's position in this rank's timetable; None: messages take channels in the order of sends."""
        self._expected: deque[tuple[int, Message]] = deque()
        """Tag and message of the receives on channels that have not begun, in the order of the timetable."""
        self._uses_channels = False
        """Whether a step runs in which messages take channels."""
        self._has_left = False
        """Whether this rank sends nothing more on them in this step."""
        self._peers_left: set[int] = set()
        """Ranks that have announced the same."""
        self._timeout = state.timeout
        self._others = [peer for peer in range(len(self.ranks)) if peer != self._rank]
        self._sending: list[list[tuple[int, int, SentMessage]]] = [[] for _ in self.ranks]
        """By rank, what was sent there: heaps by the index of the action that takes it, and by the order of sends."""
        self._kept: list[object] = []
        """Receives that were posted and forgotten."""
        self._first_tag = 0
        """After those of forgotten receives; all ranks count alike."""
        self._posted: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self._buffers = HostBuffers()
        self.outbox = Outbox(self.send_bytes)
        self.messages: Mapping[MessageKey, Message] = {}
        """What the plan of the present step lets this rank send and receive; set by the executor."""
        self.num_messages = 0
        self.num_bytes = 0
        self.waiting_since: float | None = None
        """Since when this rank has been waiting for another, of `time.monotonic()`."""
        self.failure: UsageError | None = None
        """Why the wait cannot end, once the watch for divergence has found out."""
        self.waited_ns = 0
        """How long compute has waited for values and gradients."""
        self.recorder: MessageRecorder | None = None
        """Called for every value and gradient that is sent or received; None costs nothing."""
        self.awaits_data = False
        """Whether a receive waits until its data are on the GPU, so that waits can be timed apart from compute."""

    def connect(self, transfers: Iterable[P2PTransfer]) -> None:
        """Connect the GPUs between which values travel; all ranks call this with the same transfers."""
        if self._channels is not None:
            self._channels.connect([(transfer.source, transfer.target) for transfer in transfers])

    @property
    def has_channels(self) -> bool:
        """Whether messages may travel from GPU to GPU."""
        return self._channels is not None

    def follow(self, timetable: Timetable | None, over: Collection[int] = ()) -> None:
        """Let messages take channels from now on to the end of the step; all ranks call this alike.

        Args:
            timetable: what this rank sends and receives. None: messages take channels in the order of the calls, which
                is that of the program on all ranks.
            over: microbatches whose forward is over.
        """
        if self._channels is None or not self._channels.peers:
            return
        if not self._uses_channels:
            self._uses_channels, self._has_left = True, False
            self._peers_left.clear()
            if timetable is not None:
                self._channels.begin_step(timetable.blocks)
        self._positions = None
        self._expected.clear()
        if timetable is None:
            return
        self._positions = {}
        for entry in timetable.entries:
            message = self._message(entry.microbatch, entry.transfer, entry.backward)
            if (entry.microbatch in over and not entry.backward) or not self._channels.is_connected_to(message.peer):
                continue
            tag = self._tag(message)
            self._positions[tag] = len(self._positions)
            if message.peer == entry.sender and not self._has_left:
                self._expected.append((tag, message))

    def leave_channels(self) -> None:
        """Send the rest of the step through the hosts: it has diverged from the timetable.

        All ranks do so when one does. Returns when receives have begun of all that the others sent before they left, so
        that no nccl kernel stays without its partner.
        """
        if not self._uses_channels or self._has_left:
            return
        self._announce_leaving()
        self._drain()

    def _is_on_channel(self, peer: int, tag: int) -> bool:
        """Return whether a message to or from a rank travels on a channel, unless the two ranks have left them."""
        if not self._uses_channels or self._channels is None or not self._channels.is_connected_to(peer):
            return False
        return self._positions is None or tag in self._positions

    # --- values and gradients ------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, microbatch: int, transfer: P2PTransfer, *, copy: bool = False) -> None:
        """Send a value (an activation) to the rank that needs it; do not wait until it has arrived.

        Args:
            copy: it may be changed in place before it has arrived.
        """
        if transfer.spec.order is not None:
            tensor = permute_to_memory(tensor, transfer.spec.order)
        if copy and (self._on_cpu or self._uses_channels):  # from a GPU through the hosts, a copy travels anyway
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._send_message(tensor, self._message(microbatch, transfer, False))

    def send_gradient(self, gradient: torch.Tensor | None, microbatch: int, transfer: P2PTransfer) -> None:
        """Send the gradient of a value back to the rank that sent the value; None: it has no gradient."""
        if gradient is not None:
            if gradient.requires_grad:
                gradient = gradient.detach()
            if transfer.spec.order is not None:
                gradient = permute_to_memory(gradient, transfer.spec.order)
        self._send_message(gradient, self._message(microbatch, transfer, True))

    def post(self, message: Message) -> None:
        """Start a receive before its data is needed; messages on channels begin in the order of the timetable."""
        tag = self._tag(message)
        if tag in self._posted:
            return
        if self._uses_channels and (tag in self._begun_receives or self._expects_on_channel(message.peer, tag)):
            return
        buffer = self._buffers.take(message.transfer.spec)
        self._posted[tag] = self._recv(buffer, message.peer, tag, message), buffer

    def receive(self, microbatch: int, transfer: P2PTransfer, use: Use | None = None) -> torch.Tensor:
        """Return a value that another rank sends.

        Args:
            use: applied to the tensor, and its result returned. On a CPU it runs before the data have arrived, so that
                it delays nobody.
        """
        value = self._receive_message(self._message(microbatch, transfer, False), use)
        assert value is not None, "only gradients may be None"
        return value

    def announce(self, microbatch: int, transfer: P2PTransfer) -> None:
        """Tell the receiver which value `send` will send next; without a record, it may expect one of another size.

        Gloo ends the process if a message is longer than its receive, and says nothing if it is shorter.
        """
        message = self._message(microbatch, transfer, False)
        text = f"{transfer.spec.text:{_TEXT_BYTES}.{_TEXT_BYTES}}".encode()
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), message.peer, self._tag(message), message)

    def announced(self, microbatch: int, transfer: P2PTransfer) -> str:
        """Return the text of the spec that the sender has announced."""
        message = self._message(microbatch, transfer, False)
        text = torch.empty(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        self._wait(self._recv(text, message.peer, self._tag(message), message), message.peer, message)
        return bytes(text.tolist()).decode().rstrip()

    def receive_gradient(self, microbatch: int, transfer: P2PTransfer) -> torch.Tensor | None:
        """Return the gradient of a value that was sent; None if it has none."""
        return self._receive_message(self._message(microbatch, transfer, True), None)

    def _recv(self, buffer: torch.Tensor, source: int, tag: int, what: MessageLabel) -> dist.Work:
        try:
            return self._group.recv([buffer], source, tag)
        except RuntimeError as error:
            raise self._explained(error, what, source) from None

    def _explained(self, error: RuntimeError, what: MessageLabel, peer: int, started: float | None = None) -> Exception:
        since = time.monotonic() if started is None else started
        return explain_error(error, describe_message(what), [self.ranks[peer]], since)

    def _tag(self, message: Message) -> int:
        return self._first_tag + message.tag

    def _message(self, microbatch: int, transfer: P2PTransfer, backward: bool) -> Message:
        message = self.messages.get((microbatch, transfer.number, backward))
        return message or Message(self._rank, microbatch, transfer, backward)

    def _send_message(self, tensor: torch.Tensor | None, message: Message) -> None:
        recorder = self.recorder
        start_ns = 0 if recorder is None else time.perf_counter_ns()
        target, tag = message.peer, self._tag(message)
        if self._uses_channels and self._channels is not None and self._prepare_channel_send(target, tag):
            self._send_on_channel(self._channels, tensor, tag, message)
        else:
            if tensor is None:  # on a channel a header alone is enough; here the message has its usual length
                tensor = none_gradient_message(message.transfer.spec)
            self._send(tensor, target, tag, message, message.peer_index)
        if recorder is not None:
            num_bytes = 0 if tensor is None else tensor.nbytes
            recorder("send", target, num_bytes, tag, start_ns, time.perf_counter_ns())

    def _receive_message(self, message: Message, use: Use | None) -> torch.Tensor | None:
        source, spec, tag = message.peer, message.transfer.spec, self._tag(message)
        start_ns = time.perf_counter_ns() if self._uses_channels else 0
        if self._uses_channels and self._channels is not None and self._prepare_channel_receive(tag, message):
            result = self._take_from_channel(self._channels, tag, spec, use, start_ns)
        else:
            posted = self._posted.pop(tag, None)
            buffer = self._buffers.take(spec) if posted is None else posted[1]
            work = self._recv(buffer, source, tag, message) if posted is None else posted[0]
            # On a CPU the buffer is the value: prepare the leaf now, while its data travel.
            result = _usable(buffer, spec, use) if self._on_cpu else None
            start_ns = time.perf_counter_ns()
            self._wait(work, source, message)
            self.waited_ns += time.perf_counter_ns() - start_ns
            if message.backward and is_none_gradient(buffer, spec):
                result = None
            elif result is None:
                result = _usable(buffer.to(self._device), spec, use)
        if message.peer_index is not None:
            self._release_sent(source, message.peer_index)
        if self.recorder is not None:
            # On a channel, a gradient of None is a header without a message.
            is_header = result is None and self._uses_channels and not self._has_left
            num_bytes = 0 if is_header else spec.num_bytes
            self.recorder("receive", source, num_bytes, tag, start_ns, time.perf_counter_ns())
        return result

    def _send(
        self, tensor: torch.Tensor, target: int, tag: int, what: MessageLabel, index: int | None = None
    ) -> SentMessage:
        outgoing = tensor.contiguous() if self._on_cpu else tensor.contiguous().cpu()
        self.num_messages += 1
        self.num_bytes += outgoing.nbytes
        try:
            work = self._group.send([outgoing], target, tag)
        except RuntimeError as error:
            raise self._explained(error, what, target) from None
        sent = SentMessage(work, outgoing, what)
        heappush(self._sending[target], (_NOBODY_KNOWS if index is None else index, self.num_messages, sent))
        return sent

    # --- channels -----------------------------------------------------------------------------------------------------

    def _prepare_channel_send(self, target: int, tag: int) -> bool:
        """Begin all receives that come before a message; return whether the message then goes on a channel."""
        if not self._is_on_channel(target, tag):
            return False
        if self._positions is not None:
            self._begin_receives_until(self._positions[tag])
        return not self._has_left  # one of those headers may have announced that a peer has left

    def _expects_on_channel(self, source: int, tag: int) -> bool:
        return self._is_on_channel(source, tag) and source not in self._peers_left

    def _prepare_channel_receive(self, tag: int, message: Message) -> bool:
        """Begin receives up to this message; return False if it comes through the hosts."""
        if tag not in self._begun_receives and self._expects_on_channel(message.peer, tag):
            if self._positions is not None:
                self._begin_receives_until(self._positions[tag] + 1)
            else:
                self._expected.append((tag, message))
                self._begin_next_receive()
        return tag in self._begun_receives

    def _begin_receives_until(self, position: int) -> None:
        """Begin all receives before a position of the timetable."""
        assert self._positions is not None, "there is a timetable"
        while self._expected and self._positions[self._expected[0][0]] < position:
            self._begin_next_receive()

    def _begin_next_receive(self) -> None:
        """Wait for the header of the next message, and begin to receive what it announces."""
        tag, message = self._expected.popleft()
        source = message.peer
        if source in self._peers_left:
            return
        announced, num_bytes = self._receive_header(source, message)
        if announced == LEFT:
            self._peers_left.add(source)
            self.leave_channels()
        elif announced == tag:
            assert self._channels is not None, "a header came without channels"
            self._begun_receives[tag] = self._channels.receive(num_bytes, source) if num_bytes > 0 else None
        else:
            raise UsageError(
                f"pipeline rank {source} has sent message {announced} where {describe_message(message)} was due"
                f" ({tag})",
                hint="the ranks of a pipeline run the same step, with the same configuration",
            )

    def _receive_header(self, source: int, what: MessageLabel) -> tuple[int, int]:
        """Wait for the next header of a rank; return which message it announces and how many bytes that has."""
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        self._wait(self._recv(header, source, Tag.HEADERS, what), source, what)
        tag, num_bytes = header.tolist()
        return tag, num_bytes

    def _announce_leaving(self) -> None:
        """Announce to all connected ranks that nothing more comes from this one."""
        assert self._channels is not None, "only a step that uses channels can leave them"
        self._has_left = True
        for peer in self._channels.peers:
            self._send(torch.tensor([LEFT, 0], device="cpu"), peer, Tag.HEADERS, _END)

    def _next_source(self) -> int | None:
        """Return whose header is next; None if all ranks have left."""
        assert self._channels is not None, "only a step that used channels has headers"
        while self._expected and self._expected[0][1].peer in self._peers_left:
            self._expected.popleft()
        if self._expected:
            return self._expected[0][1].peer
        return next((peer for peer in self._channels.peers if peer not in self._peers_left), None)

    def _drain(self) -> None:
        """Read headers until all connected ranks have left, and begin the receives that they announce."""
        while (source := self._next_source()) is not None:
            self._read_next(source)

    def _read_next(self, source: int) -> None:
        if self._expected:
            self._begin_next_receive()
            return
        announced, _ = self._receive_header(source, _END)
        if announced != LEFT:
            raise UsageError(
                f"pipeline rank {source} has sent message {announced} after all that was due",
                hint="the ranks of a pipeline run the same step, with the same configuration",
            )
        self._peers_left.add(source)

    def _discard_untaken(self) -> None:
        """Release what has arrived and nobody has taken."""
        for pending in self._begun_receives.values():
            if pending is not None and self._channels is not None:
                self._channels.discard(pending)
        self._begun_receives.clear()

    def _send_on_channel(self, channels: P2PChannels, tensor: torch.Tensor | None, tag: int, message: Message) -> None:
        """Send a header and the message that it announces; the header alone if the message has no bytes."""
        target, num_bytes = message.peer, NO_GRADIENT if tensor is None else tensor.nbytes
        header = torch.tensor([tag, num_bytes], device="cpu")
        sent = self._send(header, target, Tag.HEADERS, message, message.peer_index)
        if tensor is None or not num_bytes:
            return
        self.num_messages += 1
        self.num_bytes += num_bytes
        outgoing = tensor.contiguous()
        sent.header, sent.tensor, sent.version = header, outgoing, version_of(outgoing)
        sent.on_channel = channels.send(outgoing, target)

    def _take_from_channel(
        self, channels: P2PChannels, tag: int, spec: TensorSpec, use: Use | None, start_ns: int
    ) -> torch.Tensor | None:
        """Return the value or gradient of a receive that has begun."""
        pending = self._begun_receives.pop(tag)
        if pending is not None:
            value = channels.received(pending).view(spec.dtype).view(spec.shape)
            if self.awaits_data:
                devices.wait_for_stream(self._device)
        self.waited_ns += time.perf_counter_ns() - start_ns
        if pending is None:
            if spec.num_bytes:
                return None
            value = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return _usable(value.detach(), spec, use)

    def _wait(self, work: dist.Work, peer: int, what: MessageLabel) -> None:
        if self.outbox.waiting:
            self.outbox.flush()  # the rank that this one waits for may wait for a message in the outbox
        self.waiting_since = started = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if self.failure is not None:
                raise self.failure from None
            raise self._explained(error, what, peer, started) from None
        self.waiting_since = None

    def _release_sent(self, peer: int, before: int = _NOBODY_KNOWS + 1) -> None:
        """Release what `peer` took before action `before` of its list, or wait until it has taken everything.

        For the action from which it has just sent a message this waits for nothing: see [Note: releasing sent tensors].
        """
        sending = self._sending[peer]
        while sending and sending[0][0] < before:
            sent = sending[0][2]
            self._wait(sent.work, peer, sent.what)
            if sent.on_channel is not None:  # the peer has taken the header, so it has begun to receive
                sent.on_channel[0].wait()
            heappop(sending)  # only now: if a wait fails, the message may still be read
            if version_of(sent.tensor) != sent.version:
                raise UsageError(
                    f"a value was changed in place on its way to pipeline rank {peer}: {describe_message(sent.what)}",
                    hint="change a copy, for example `x = x.add(1)` instead of `x.add_(1)`",
                )

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        self.outbox.flush()
        for peer in self._others:
            self._release_sent(peer)

    def end_messages(self) -> None:
        """Wait until everything that was sent has arrived; what follows goes through the hosts."""
        # Messages that nobody has taken must be received all the same: their senders wait for it.
        while self._uses_channels and self._expected:
            self._begin_next_receive()
        self.flush()
        self._discard_untaken()
        self._uses_channels = False

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived, and keep no more memory than the step needed."""
        self.end_messages()
        self._buffers.trim()
        if self._channels is not None and (count := self._channels.pool.num_unplanned):
            self._channels.pool.num_unplanned = 0
            _log.debug("For %s messages of a step, memory was allocated while it ran.", count)

    def forget_posted(self, num_microbatches: int) -> None:
        """Forget receives in which nothing will arrive: microbatches have left the record that they were posted for.

        All ranks must call this.

        Args:
            num_microbatches: of the step.
        """
        # Keep their memory: a receive that goes away after gloo has announced it blocks its connection.
        self._kept += self._posted.values()
        self._posted.clear()
        # It would also take a later message of its tag: never use the tags of these microbatches again.
        self._first_tag += 2 * TRANSFERS_PER_MICROBATCH * num_microbatches
        if self._first_tag > _LAST_FIRST_TAG:
            raise UnsupportedError(
                "microbatches took another way than the recorded one in so many kinds of step that no tags are left for"
                f" their messages: {self._first_tag // (2 * TRANSFERS_PER_MICROBATCH):,} microbatches in all",
                hint="hand the same layers the same shapes in each step (padding), or start from a checkpoint",
            )

    # --- anything else of known size ---------------------------------------------------------------------------------

    def send_bytes(self, packed: torch.Tensor, target: int, tag: int) -> None:
        """Send a CPU tensor, which must not change any more, to a rank that calls `receive_bytes` or `expect_bytes`."""
        self._send(packed, target, tag, "bytes of the engine's own")

    def expect_bytes(self, num_bytes: int, source: int, tag: int, what: str) -> Callable[[], torch.Tensor]:
        """Start to receive bytes from one rank; return a function that waits for them and returns them."""
        packed = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        work = self._recv(packed, source, tag, what)

        def wait() -> torch.Tensor:
            self._wait(work, source, what)
            return packed

        return wait

    def receive_bytes(self, num_bytes: int, source: int, tag: int, what: str) -> torch.Tensor:
        """Return the bytes that one rank sends."""
        return self.expect_bytes(num_bytes, source, tag, what)()

    # --- structures, once per kind of call -------------------------------------------------------------------------

    def broadcast_object(
        self,
        value: Any,
        targets: Sequence[int] | None = None,
        tag: int = Tag.OBJECT,
        what: str = "what a call returns",
    ) -> None:
        """Send a Python object to every other rank of the pipeline, or some; each of them calls `receive_object`."""
        data = torch.frombuffer(bytearray(pickled(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], device="cpu")
        for target in self._others if targets is None else targets:
            self._send(size, target, tag, what)
            self._send(data, target, tag + 1, what)

    def receive_object(self, source: int, what: str, tag: int = Tag.OBJECT) -> Any:
        """Return the Python object that rank `source` broadcasts; it comes from a rank of this very job."""
        size = self.receive_bytes(8, source, tag, what).view(torch.int64)
        data = self.receive_bytes(int(size.item()), source, tag + 1, what)
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own job's rank


class HostBuffers:
    """The host memory of one rank's received messages, reused as soon as the last tensor in it is gone.

    A large block that is freed goes back to the system, and its next use costs a page fault per 4 KiB: for a message of
    8 MiB about as long as copying it.

    Nobody can know how long a received value is needed: its graph saves it, the user's code keeps it, a view of it is
    returned. So each block is lent as an array of its own. Torch holds the array as long as any tensor uses its memory,
    and the array gives the block back when it dies.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        self._used: set[int] = set()
        """Sizes in bytes that were asked for since the last `trim`."""

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor of this shape and dtype, with whatever is in it."""
        num_bytes = spec.num_bytes
        if num_bytes < _SMALLEST_BYTES:
            return torch.empty_strided(spec.shape, spec.dense_stride, dtype=spec.dtype, device="cpu")
        self._used.add(num_bytes)
        free = self._free.setdefault(num_bytes, [])
        block = free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy()
        lent = block.view()
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(spec.dtype).view(spec.shape)

    def trim(self) -> None:
        """Give up free memory of sizes that were not asked for since the last time: batches have changed."""
        self._free = {num_bytes: blocks for num_bytes, blocks in self._free.items() if num_bytes in self._used}
        self._used.clear()


class Outbox:
    """Messages that wait until the device has copied their bytes to the host, which does other work meanwhile.

    They go out in the order in which they were given: at the next action that finds their copy done, or at the latest
    when this rank is about to wait for another one, which may be waiting for just these. Bytes that are on the host
    already, as always on a CPU, go out at once.

    Args:
        send: called with `(packed, target, tag)`.
    """

    def __init__(self, send: Callable[[torch.Tensor, int, int], None]) -> None:
        self._send = send
        self.waiting: deque[tuple[torch.Event | None, torch.Tensor, int, int]] = deque()

    def send(self, packed: torch.Tensor, target: int, tag: int, ready: torch.Event | None) -> None:
        """Send a tensor of the host as soon as the device has come to `ready`; None: at once."""
        if ready is None and not self.waiting:
            self._send(packed, target, tag)
        else:
            self.waiting.append((ready, packed, target, tag))

    def poll(self) -> None:
        """Send what is ready, without waiting for anything."""
        while self.waiting and devices.has_happened(self.waiting[0][0]):
            self._send(*self.waiting.popleft()[1:])

    def flush(self) -> None:
        """Wait for the device, and send everything."""
        while self.waiting:
            ready, packed, target, tag = self.waiting.popleft()
            devices.wait_for_event(ready)
            self._send(packed, target, tag)
