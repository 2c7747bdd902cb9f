"""Send values and gradients between the ranks of one pipeline.

All ranks number the moves of a microbatch alike, so a tag (microbatch, move, direction) is all a message needs: no
headers, no shapes, no handshakes. Compute never waits for a send; receives may be posted before they are needed.

[Note: letting go of what was sent] gloo reads a tensor from another thread until the receiver has it, and cannot be
asked whether it is done; waiting for it could wait for a rank that waits for us. But who receives a message from a rank
knows what that rank has done before it sent it: everything earlier in its list of actions, hence all receives of those.
So each receive lets go of the sends to that rank that it must have taken before, without waiting for anything.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from smpkit.torch.deadline import waiting
from smpkit.torch.pipeline.specs import TensorSpec, spec_of
from smpkit.torch.state import state

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Move

__all__ = ["MessageRecorder", "Place", "Tag", "Transport", "pack", "packed_bytes", "unpack"]

_MOVES_PER_MICROBATCH: Final = 1 << 12
_ALIGNMENT: Final = 16  # bytes; a packed tensor starts at a multiple, so that it can be viewed as any dtype
_Key = tuple[int, int, bool]

MessageRecorder = Callable[[str, int, int, int, int, int], object]
"""Called with `(direction, peer, num_bytes, tag, start_ns, end_ns)`.

`direction` is "send" or "receive", `peer` a pp_rank, `tag` the same on both ends and in every step. A send lasts as
long as it kept its caller from other work, a receive from when its data was needed until it was there; times are
`time.perf_counter_ns()`.
"""

Place = Callable[[int, bool, int, int], int | None]
"""`place(pp_rank, backward, segment, microbatch)`: where in the list of its rank an action stands, if anywhere."""


_NUM_EPOCHS: Final = 1 << 6


class Tag:
    """Tags of everything that is no value or gradient of a microbatch."""

    OBJECT_SIZE: Final = (1 << 30) + 1
    OBJECT: Final = OBJECT_SIZE + 1
    INPUTS_HEAD: Final = OBJECT_SIZE + 2
    PATHS: Final = OBJECT_SIZE + 3
    COSTS: Final = OBJECT_SIZE + 4
    PING: Final = OBJECT_SIZE + 5
    INPUTS_REST: Final = (1 << 30) + (1 << 24)
    """Plus the low 24 bits of a checksum of shapes: ranks that expect different bytes never meet in one message."""
    OUTPUTS: Final = (1 << 30) + (2 << 24)
    """As INPUTS_REST."""


@dataclass
class _Sent:
    """A message on its way; keeps the tensor, which gloo reads from another thread."""

    work: dist.Work
    tensor: torch.Tensor
    taken_at: int | None
    """Where the action that takes it stands in the receiver's list; None: not known."""


class Transport:
    """One rank's end of the pipeline's connections.

    Args:
        group: the pipeline's ranks (PP_GROUP), for CPU tensors.
        ranks: their global ranks, for messages.
        device: where values live; on a GPU they are staged through the host.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self._group = group
        self._ranks = list(ranks)
        self._rank = group.rank()
        self._device = device
        self._others = [peer for peer in range(len(self._ranks)) if peer != self._rank]
        self._sending: list[list[_Sent]] = [[] for _ in self._ranks]
        self._orphans: list[object] = []
        self._num_abandoned = 0
        """How many steps an exception has ended; all ranks count alike, for none ends a step alone."""
        self._posted: dict[_Key, tuple[dist.Work, torch.Tensor]] = {}
        self.place: Place | None = None
        """Where actions of the step that runs stand, if the executor knows."""
        self.num_messages = 0
        self.num_bytes = 0
        self.waited_ns = 0
        """How long compute has waited for values and gradients."""
        self.recorder: MessageRecorder | None = None
        """Told of every value and gradient that is sent or received; None costs nothing."""

    # --- values and gradients ------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, microbatch: int, move: Move) -> None:
        """Send a value forward."""
        self._send_move(tensor, microbatch, move, backward=False)

    def send_gradient(self, gradient: torch.Tensor, microbatch: int, move: Move) -> None:
        """Send the gradient of a value back to where it came from."""
        self._send_move(gradient.detach(), microbatch, move, backward=True)

    def post(self, microbatch: int, move: Move, *, backward: bool) -> None:
        """Start a receive before its data is needed."""
        key = (microbatch, move.number, backward)
        if key not in self._posted:
            buffer = torch.empty(move.spec.shape, dtype=move.spec.dtype)
            source = move.target if backward else move.source
            work = self._group.recv([buffer], source, self._tag(microbatch, move, backward=backward))
            self._posted[key] = (work, buffer)

    def receive(self, microbatch: int, move: Move) -> torch.Tensor:
        """Return a value that another rank sends."""
        what = f"forward of microbatch {microbatch} ({move.spec})"
        return self._receive_move(microbatch, move, what, backward=False)

    def receive_gradient(self, microbatch: int, move: Move) -> torch.Tensor:
        """Return the gradient of a value that was sent."""
        what = f"backward of microbatch {microbatch} (gradient of {move.spec})"
        return self._receive_move(microbatch, move, what, backward=True)

    def _send_move(self, tensor: torch.Tensor, microbatch: int, move: Move, *, backward: bool) -> None:
        start_ns = time.perf_counter_ns()
        target, segment = (move.source, move.source_segment) if backward else (move.target, move.target_segment)
        tag = self._tag(microbatch, move, backward=backward)
        taken_at = None if self.place is None else self.place(target, backward, segment, microbatch)
        self._send(tensor, target, tag, taken_at)
        self._record("send", target, tensor.nbytes, tag, start_ns)

    def _receive_move(self, microbatch: int, move: Move, what: str, *, backward: bool) -> torch.Tensor:
        start_ns = time.perf_counter_ns()
        source, segment = (move.target, move.target_segment) if backward else (move.source, move.source_segment)
        self.post(microbatch, move, backward=backward)
        work, buffer = self._posted.pop((microbatch, move.number, backward))
        with waiting(what, [self._ranks[source]]):
            work.wait(state.timeout)
        self.waited_ns += time.perf_counter_ns() - start_ns
        arrived = buffer.to(self._device)
        if self.place is not None and self._sending[source]:
            self._let_go(source, self.place(source, backward, segment, microbatch))
        self._record("receive", source, buffer.nbytes, self._tag(microbatch, move, backward=backward), start_ns)
        return arrived

    def _tag(self, microbatch: int, move: Move, *, backward: bool) -> int:
        assert move.number < _MOVES_PER_MICROBATCH, "more moves in one microbatch than tags"
        tag = (microbatch * _MOVES_PER_MICROBATCH + move.number) * 2 + backward
        return tag + (self._num_abandoned % _NUM_EPOCHS << 24)

    def _send(self, tensor: torch.Tensor, target: int, tag: int, taken_at: int | None = None) -> None:
        outgoing = tensor.contiguous().cpu()
        self.num_messages += 1
        self.num_bytes += outgoing.nbytes
        self._sending[target].append(_Sent(self._group.send([outgoing], target, tag), outgoing, taken_at))

    def _let_go(self, peer: int, done_before: int | None) -> None:
        """Forget what `peer` took before the action that it has just sent from: see [Note: letting go]."""
        if done_before is None:
            return
        kept = []
        for sent in self._sending[peer]:
            if sent.taken_at is not None and sent.taken_at < done_before:
                self._finish(sent, peer)
            else:
                kept.append(sent)
        self._sending[peer] = kept

    def _finish(self, sent: _Sent, peer: int) -> None:
        with waiting("the send of a value", [self._ranks[peer]]):
            sent.work.wait(state.timeout)

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        for peer, sending in enumerate(self._sending):
            self._sending[peer] = []
            for sent in sending:
                self._finish(sent, peer)

    def abandon(self) -> None:
        """Forget what an exception interrupted; what is under way must not be taken for the next step's.

        Messages under way keep their memory, and nobody waits for them: another rank may have got less far and still
        take what was sent here; and a receive that goes away after gloo has announced it blocks its connection.
        """
        self._orphans += [sent for sending in self._sending for sent in sending]
        self._orphans += self._posted.values()
        for sending in self._sending:
            sending.clear()
        self._num_abandoned += 1
        self._posted.clear()
        self.place = None

    def _record(self, direction: str, peer: int, num_bytes: int, tag: int, start_ns: int) -> None:
        if self.recorder is not None:
            self.recorder(direction, peer, num_bytes, tag, start_ns, time.perf_counter_ns())

    # --- anything else of known size ---------------------------------------------------------------------------------

    def send_bytes(self, packed: torch.Tensor, target: int, tag: int) -> None:
        """Send a CPU tensor to one rank, which calls `receive_bytes` or `expect_bytes`; it must not change any more."""
        self._send(packed, target, tag)

    def expect_bytes(self, num_bytes: int, source: int, tag: int, what: str) -> Callable[[], torch.Tensor]:
        """Start to receive bytes from one rank; return a function that waits for them and returns them."""
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        work = self._group.recv([packed], source, tag)

        def wait() -> torch.Tensor:
            with waiting(what, [self._ranks[source]]):
                work.wait(state.timeout)
            return packed

        return wait

    def receive_bytes(self, num_bytes: int, source: int, tag: int, what: str) -> torch.Tensor:
        """Return the bytes that one rank sends."""
        return self.expect_bytes(num_bytes, source, tag, what)()

    # --- structures, once per kind of call -------------------------------------------------------------------------

    def broadcast_object(self, value: Any) -> None:
        """Send a Python object to every other rank of the pipeline, each of which calls `receive_object`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        for target in self._others:
            self._send(size, target, Tag.OBJECT_SIZE)
            self._send(data, target, Tag.OBJECT)

    def receive_object(self, source: int, what: str) -> Any:
        """Return the Python object that rank `source` broadcasts; it comes from a rank of this very job."""
        size = self.receive_bytes(8, source, Tag.OBJECT_SIZE, what).view(torch.int64)
        data = self.receive_bytes(int(size.item()), source, Tag.OBJECT, what)
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own job's rank


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into one block of bytes on the CPU."""
    specs = [spec_of(tensor) for tensor in tensors]
    packed = torch.empty(packed_bytes(specs), dtype=torch.uint8)
    for copy, tensor in zip(unpack(packed, specs), tensors, strict=True):
        copy.copy_(tensor.detach())
    return packed


def packed_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of a block that `pack` makes."""
    return sum(_aligned(spec.num_bytes) for spec in specs)


def unpack(packed: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return views into a block, each with the shape and dtype of its spec."""
    views, start = [], 0
    for spec in specs:
        views.append(packed[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape))
        start += _aligned(spec.num_bytes)
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
