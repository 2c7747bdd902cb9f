"""Send values and gradients between the GPUs of one pipeline's ranks, over nccl, in one order that all ranks follow.

`channels.py` says why they need one order and headers, and how all ranks leave it where it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import version_of
from smpkit.torch.pipeline.channels import P2PChannels, PendingReceive
from smpkit.torch.pipeline.host_link import HostLink, SentTensor
from smpkit.torch.pipeline.message_order import Message, Timetable
from smpkit.torch.pipeline.messages import LEFT, NO_GRADIENT, MessageLabel, Tag, laid_out

_END: Final = "the end of a step that left its schedule"


class GpuLink:
    """One rank's GPU, connected with those of others; `hosts` brings the headers of messages."""

    def __init__(self, channels: P2PChannels, hosts: HostLink, rank: int, device: torch.device) -> None:
        self.channels = channels
        self._hosts = hosts
        self._rank = rank
        self._device = device
        self._is_in_use = False
        """Whether a step runs in which messages take channels."""
        self._has_left = False
        """Whether this rank sends nothing more on them in this step."""
        self._peers_left: set[int] = set()
        """Ranks that have announced the same."""
        self._positions: dict[int, int] | None = None
        """By tag, a message's position in this rank's timetable; None: messages take channels in the order of sends."""
        self._expected: deque[Message] = deque()
        """Receives that have not begun, in the order of the timetable."""
        self._begun: dict[int, tuple[int, PendingReceive] | None] = {}
        """By tag, receives that have begun, each with its number; None where the header says it all."""
        self._sent: deque[tuple[int, SentTensor]] = deque()
        """What was sent, each with its number."""
        self._num_begun = 0
        """How many sends and receives have begun; on the GPU they run one after the other."""

    def follow(self, timetable: Timetable | None, over: Collection[int] = ()) -> None:
        """Let messages take channels from now on to the end of the step; all ranks call this alike.

        Args:
            timetable: what this rank sends and receives. None: messages take channels in the order of the calls, which
                is that of the program on all ranks.
            over: microbatches whose forward is over.
        """
        if not self.channels.peers:
            return
        if not self._is_in_use:
            self._is_in_use, self._has_left = True, False
            self._peers_left.clear()
            if timetable is not None:
                self.channels.pool.fit(timetable.blocks)
        self._positions = None
        self._expected.clear()
        if timetable is None:
            return
        self._positions = {}
        for message in timetable.messages:
            is_received = message.receiver == self._rank
            peer = message.sender if is_received else message.receiver
            if (message.microbatch in over and not message.backward) or not self.channels.is_connected_to(peer):
                continue
            self._positions[self._hosts.tag_of(message)] = len(self._positions)
            if is_received and not self._has_left:
                self._expected.append(message)

    def leave(self) -> None:
        """Send the rest of the step through the hosts: it has diverged from the timetable.

        All ranks do so when one does. Returns when receives have begun of all that the others sent before they left, so
        that no nccl kernel stays without its partner.
        """
        if not self._is_in_use or self._has_left:
            return
        self._has_left = True
        for peer in self.channels.peers:
            self._hosts.send_bytes(torch.tensor([LEFT, 0], device="cpu"), peer, Tag.HEADERS, _END)
        while (source := self._next_source()) is not None:
            self._read_next(source)

    def send(self, tensor: torch.Tensor | None, message: Message) -> bool:
        """Send a value or gradient, None as a header alone; return False if it has to go through the hosts.

        All receives that come before it begin first.
        """
        target, tag = message.receiver, self._hosts.tag_of(message)
        if not self._carries(target, tag):
            return False
        if self._positions is not None:
            self._begin_receives_until(self._positions[tag])
        if self._has_left:  # one of those headers has announced that a peer has left
            return False
        num_bytes = NO_GRADIENT if tensor is None else tensor.nbytes
        self._hosts.send_bytes(torch.tensor([tag, num_bytes], device="cpu"), target, Tag.HEADERS, message)
        if tensor is not None and num_bytes:
            self._hosts.num_messages += 1
            self._hosts.num_bytes += num_bytes
            work, data = self.channels.send(tensor.contiguous(), target)
            self._num_begun += 1
            self._sent.append((self._num_begun, SentTensor(work, data, version_of(data), target, message)))
        return True

    def expects(self, message: Message) -> bool:
        """Return whether a message comes on a channel, as far as is known."""
        tag = self._hosts.tag_of(message)
        return tag in self._begun or (self._carries(message.sender, tag) and message.sender not in self._peers_left)

    def begin_receive(self, message: Message) -> bool:
        """Begin receives up to this message; return False if it comes through the hosts."""
        tag = self._hosts.tag_of(message)
        if tag not in self._begun and self.expects(message):
            if self._positions is not None:
                self._begin_receives_until(self._positions[tag] + 1)
            else:
                self._expected.append(message)
                self._begin_next_receive()
        return tag in self._begun

    def take(self, message: Message, *, awaits_data: bool) -> torch.Tensor | None:
        """Return the value or gradient of a receive that has begun.

        Args:
            awaits_data: whether to wait until it is on the GPU, so that waits can be timed apart from compute.
        """
        spec, begun = message.transfer.spec, self._begun.pop(self._hosts.tag_of(message))
        if begun is None:
            if spec.num_bytes:
                return None
            return laid_out(torch.empty(spec.shape, dtype=spec.dtype, device=self._device), spec)
        number, pending = begun
        value = self.channels.received(pending).view(spec.dtype).view(spec.shape)
        # The current stream has waited for it, and so for all messages before it.
        while self._sent and self._sent[0][0] < number:
            self._release_next()
        if awaits_data:
            devices.wait_for_stream(self._device)
        return laid_out(value.detach(), spec)

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived; what follows goes through the hosts."""
        # Messages that nobody has taken must be received all the same: their senders wait for it.
        while self._is_in_use and self._expected:
            self._begin_next_receive()
        self._hosts.flush()  # whoever has taken a header has begun to receive
        while self._sent:
            self._release_next()
        for begun in self._begun.values():
            if begun is not None:
                self.channels.discard(begun[1])
        self._begun.clear()
        self._is_in_use = False

    def _carries(self, peer: int, tag: int) -> bool:
        """Return whether a message to or from a rank travels on a channel, unless the two ranks have left them."""
        if not self._is_in_use or not self.channels.is_connected_to(peer):
            return False
        return self._positions is None or tag in self._positions

    def _release_next(self) -> None:
        _, sent = self._sent.popleft()
        sent.work.wait()
        sent.refuse_change()

    # --- headers -------------------------------------------------------------------------------------------------

    def _begin_receives_until(self, position: int) -> None:
        """Begin all receives before a position of the timetable."""
        assert self._positions is not None, "there is a timetable"
        while self._expected and self._positions[self._hosts.tag_of(self._expected[0])] < position:
            self._begin_next_receive()

    def _begin_next_receive(self) -> None:
        """Wait for the header of the next message, and begin to receive what it announces."""
        message = self._expected.popleft()
        source, tag = message.sender, self._hosts.tag_of(message)
        if source in self._peers_left:
            return
        announced, num_bytes = self._receive_header(source, message)
        if announced == LEFT:
            self._peers_left.add(source)
            self.leave()
        elif announced == tag:
            self._begun[tag] = None
            if num_bytes > 0:
                self._num_begun += 1
                self._begun[tag] = self._num_begun, self.channels.receive(num_bytes, source)
        else:
            raise UsageError(
                f"pipeline rank {source} has sent message {announced} where {message} was due ({tag})",
                hint="the ranks of a pipeline run the same step, with the same configuration",
            )

    def _receive_header(self, source: int, what: MessageLabel) -> tuple[int, int]:
        """Wait for the next header of a rank; return which message it announces and how many bytes that has."""
        tag, num_bytes = self._hosts.receive_bytes(16, source, Tag.HEADERS, what).view(torch.int64).tolist()
        return tag, num_bytes

    def _next_source(self) -> int | None:
        """Return whose header is next; None if all ranks have left."""
        while self._expected and self._expected[0].sender in self._peers_left:
            self._expected.popleft()
        if self._expected:
            return self._expected[0].sender
        return next((peer for peer in self.channels.peers if peer not in self._peers_left), None)

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
