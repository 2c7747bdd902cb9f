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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from smpkit.errors import UsageError
from smpkit.torch.containers import pickled
from smpkit.torch.deadline import reason_of
from smpkit.torch.pipeline.absent import absent_gradient, is_absent
from smpkit.torch.pipeline.buffers import Buffers
from smpkit.torch.pipeline.record import MOVES_PER_MICROBATCH
from smpkit.torch.pipeline.specs import TensorSpec, permuted, relaid, spec_of
from smpkit.torch.state import state

if TYPE_CHECKING:
    from smpkit.torch.pipeline.record import Move

__all__ = [
    "MessageRecorder",
    "Place",
    "Tag",
    "Transport",
    "pack",
    "packed_bytes",
    "unpack",
    "unpack_copies",
    "version_of",
]

_ALIGNMENT: Final = 16  # bytes; a packed tensor starts at a multiple, so that it can be viewed as any dtype

MessageRecorder = Callable[[str, int, int, int, int, int], object]
"""Called with `(direction, peer, num_bytes, tag, start_ns, end_ns)`.

`direction` is "send" or "receive", `peer` a pp_rank, `tag` the same on both ends and in every step. A send lasts as
long as it kept its caller from other work, a receive from when its data was needed until it was there; times are
`time.perf_counter_ns()`.
"""

Place = tuple[int, bool, int, int]
"""An action by which something travels: its pp_rank, whether it is a backward, its segment and its microbatch."""

_NUM_SLOTS: Final = 1 << 17
"""Microbatches that have tags of their own; those of steps that were given up count too, see `Transport.abandon`."""


class Tag:
    """Tags of everything that is no value or gradient of a microbatch."""

    OBJECT: Final = (1 << 30) + 1
    """Its size; the object itself comes under the next tag."""
    WAYS: Final = OBJECT + 2
    """As OBJECT."""
    PATHS: Final = OBJECT + 4
    COSTS: Final = OBJECT + 5
    PING: Final = OBJECT + 6
    INPUTS_REST: Final = (1 << 30) + (1 << 24)
    """Plus the low 24 bits of a checksum of shapes: ranks that expect different bytes never meet in one message."""
    OUTPUTS: Final = (1 << 30) + (2 << 24)
    """As INPUTS_REST."""
    INPUTS_HEAD: Final = (1 << 30) + (3 << 24)
    """Plus its size."""


@dataclass(slots=True)
class _Sent:
    """A message on its way; keeps the tensor, which gloo reads from another thread."""

    work: dist.Work
    tensor: torch.Tensor
    version: int
    """How often the tensor had been changed in place: must stay so until it has arrived."""
    what: _What
    taken_at: int | None = None
    """Where the action that takes it stands in the receiver's list; None: not known."""


_What = str | tuple[int, "Move", bool]
"""What a message is, for errors: a text, or microbatch, move and whether it is the move's gradient."""


def _text(what: _What) -> str:
    if isinstance(what, str):
        return what
    microbatch, move, backward = what
    value = f"gradient of {move.spec}" if backward else str(move.spec)
    user = f" for `{move.unit}`" if move.unit else ""
    return f"{'backward' if backward else 'forward'} of microbatch {microbatch} ({value}{user})"


def _as_made(arrived: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return what has travelled with its dimensions as they were."""
    # Detached, it is no view of the buffer: torch treats changes of views in ways of their own.
    return arrived if spec.order is None else relaid(arrived, spec.shape, spec.order, spec.stride).detach()


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
        self._on_cpu = device.type == "cpu"
        self._timeout = state.timeout
        self._others = [peer for peer in range(len(self._ranks)) if peer != self._rank]
        self._sending: list[list[_Sent]] = [[] for _ in self._ranks]
        self._orphans: list[object] = []
        self._num_abandoned = 0
        """Microbatches of steps that were given up; all ranks count alike, for none gives up a step alone."""
        self._posted: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self._buffers = Buffers()
        self.places: Mapping[Place, int] = {}
        """Where in the lists of their ranks the actions of the step that runs stand, as far as the executor knows."""
        self.num_messages = 0
        self.num_bytes = 0
        self.waiting_since: float | None = None
        """Since when this rank has been waiting for another, of `time.monotonic()`."""
        self.verdict: UsageError | None = None
        """Why the wait cannot end, if somebody has found out."""
        self.waited_ns = 0
        """How long compute has waited for values and gradients."""
        self.recorder: MessageRecorder | None = None
        """Told of every value and gradient that is sent or received; None costs nothing."""

    # --- values and gradients ------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, microbatch: int, move: Move, *, copy: bool = False) -> None:
        """Send a value forward.

        Args:
            copy: it may be changed in place before it has arrived.
        """
        tensor = permuted(tensor, move.spec.order)
        if copy and self._on_cpu:  # from a device, a copy is what travels
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._send_move(tensor, microbatch, move, backward=False)

    def send_gradient(self, gradient: torch.Tensor | None, microbatch: int, move: Move) -> None:
        """Send the gradient of a value back to where it came from, or word that it has none."""
        if gradient is None:
            outgoing = absent_gradient(move.spec)
        else:
            outgoing = permuted(gradient.detach() if gradient.requires_grad else gradient, move.spec.order)
        self._send_move(outgoing, microbatch, move, backward=True)

    def post(self, microbatch: int, move: Move, *, backward: bool) -> None:
        """Start a receive before its data is needed."""
        tag = self._tag(microbatch, move, backward)
        if tag not in self._posted:
            self._posted[tag] = self._receiving(tag, move, backward)

    def receive(
        self, microbatch: int, move: Move, use: Callable[[torch.Tensor], torch.Tensor] = _as_is
    ) -> torch.Tensor:
        """Return a value that another rank sends.

        Args:
            use: makes of it what is returned. On a CPU before the data are there, so that it delays nobody.
        """
        value = self._receive_move(microbatch, move, use, backward=False)
        assert value is not None, "only gradients may be absent"
        return value

    def receive_gradient(self, microbatch: int, move: Move) -> torch.Tensor | None:
        """Return the gradient of a value that was sent; None if it has none."""
        return self._receive_move(microbatch, move, _as_is, backward=True)

    def _receiving(self, tag: int, move: Move, backward: bool) -> tuple[dist.Work, torch.Tensor]:
        buffer, source = self._buffers.take(move.spec), move.target if backward else move.source
        try:
            return self._group.recv([buffer], source, tag), buffer
        except RuntimeError as error:  # the connection is closed already
            what = f"{move.spec} for `{move.unit}`"
            raise reason_of(error, what, [self._ranks[source]], time.monotonic()) from None

    def _send_move(self, tensor: torch.Tensor, microbatch: int, move: Move, *, backward: bool) -> None:
        recorder = self.recorder
        start_ns = 0 if recorder is None else time.perf_counter_ns()
        target, segment = (move.source, move.source_segment) if backward else (move.target, move.target_segment)
        tag = self._tag(microbatch, move, backward)
        taken_at = self.places.get((target, backward, segment, microbatch))
        self._send(tensor, target, tag, (microbatch, move, backward), taken_at)
        if recorder is not None:
            recorder("send", target, tensor.nbytes, tag, start_ns, time.perf_counter_ns())

    def _receive_move(
        self, microbatch: int, move: Move, use: Callable[[torch.Tensor], torch.Tensor], *, backward: bool
    ) -> torch.Tensor | None:
        source, segment = (move.target, move.target_segment) if backward else (move.source, move.source_segment)
        tag = self._tag(microbatch, move, backward)
        work, buffer = self._posted.pop(tag) if tag in self._posted else self._receiving(tag, move, backward)
        result = use(_as_made(buffer, move.spec)) if self._on_cpu else None
        start_ns = time.perf_counter_ns()
        self._wait(work, source, (microbatch, move, backward))
        self.waited_ns += time.perf_counter_ns() - start_ns
        if backward and is_absent(buffer, move.spec):
            result = None
        elif result is None:
            result = use(_as_made(buffer.to(self._device), move.spec))
        if self._sending[source]:
            self._let_go(source, self.places.get((source, backward, segment, microbatch)))
        if self.recorder is not None:
            self.recorder("receive", source, buffer.nbytes, tag, start_ns, time.perf_counter_ns())
        return result

    def _tag(self, microbatch: int, move: Move, backward: bool) -> int:
        slot = (self._num_abandoned + microbatch) % _NUM_SLOTS
        return (slot * MOVES_PER_MICROBATCH + move.number) * 2 + backward

    def _send(self, tensor: torch.Tensor, target: int, tag: int, what: _What, taken_at: int | None = None) -> None:
        outgoing = tensor.contiguous() if self._on_cpu else tensor.contiguous().cpu()
        self.num_messages += 1
        self.num_bytes += outgoing.nbytes
        started = time.monotonic()
        try:
            work = self._group.send([outgoing], target, tag)
        except RuntimeError as error:
            raise reason_of(error, _text(what), [self._ranks[target]], started) from None
        self._sending[target].append(_Sent(work, outgoing, version_of(outgoing), what, taken_at))

    def _wait(self, work: dist.Work, peer: int, what: _What) -> None:
        self.waiting_since = started = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if self.verdict is not None:
                raise self.verdict from None
            raise reason_of(error, _text(what), [self._ranks[peer]], started) from None
        self.waiting_since = None

    def _let_go(self, peer: int, done_before: int | None) -> None:
        """Forget what `peer` took before the action that it has just sent from: see [Note: letting go]."""
        if done_before is None:
            return
        kept = []
        for sent in self._sending[peer]:
            if (taken_at := sent.taken_at) is not None and taken_at < done_before:
                self._finish(sent, peer)
            else:
                kept.append(sent)
        self._sending[peer] = kept

    def _finish(self, sent: _Sent, peer: int) -> None:
        self._wait(sent.work, peer, sent.what)
        if version_of(sent.tensor) != sent.version:
            raise UsageError(
                f"a value was changed in place on its way to pipeline rank {peer}: {_text(sent.what)}",
                hint="change a copy, for example `x = x.add(1)` instead of `x.add_(1)`",
            )

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        for peer, sending in enumerate(self._sending):
            self._sending[peer] = []
            for sent in sending:
                self._finish(sent, peer)

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived, and keep no more memory than the step needed."""
        self.flush()
        self._buffers.trim()

    def abandon(self, num_microbatches: int) -> None:
        """Forget what was interrupted; what is under way must not be taken for the next step's.

        An exception interrupts, and microbatches that stray from their record. All ranks must call this alike.
        Messages under way keep their memory, and nobody waits for them: another rank may have got less far and still
        take what was sent here; and a receive that goes away after gloo has announced it blocks its connection. It
        would also take a later message of its tag, so the tags of this step's microbatches are not used again.

        Args:
            num_microbatches: of the step that was interrupted.
        """
        self._orphans += [sent for sending in self._sending for sent in sending]
        self._orphans += self._posted.values()
        for sending in self._sending:
            sending.clear()
        self._num_abandoned += num_microbatches
        self._posted.clear()
        self.places = {}

    # --- anything else of known size ---------------------------------------------------------------------------------

    def send_bytes(self, packed: torch.Tensor, target: int, tag: int) -> None:
        """Send a CPU tensor to one rank, which calls `receive_bytes` or `expect_bytes`; it must not change any more."""
        self._send(packed, target, tag, "bytes of the engine's own")

    def expect_bytes(self, num_bytes: int, source: int, tag: int, what: str) -> Callable[[], torch.Tensor]:
        """Start to receive bytes from one rank; return a function that waits for them and returns them."""
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        started = time.monotonic()
        try:
            work = self._group.recv([packed], source, tag)
        except RuntimeError as error:  # the connection is closed already
            raise reason_of(error, what, [self._ranks[source]], started) from None

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
        size = torch.tensor([data.numel()])
        for target in self._others if targets is None else targets:
            self._send(size, target, tag, what)
            self._send(data, target, tag + 1, what)

    def receive_object(self, source: int, what: str, tag: int = Tag.OBJECT) -> Any:
        """Return the Python object that rank `source` broadcasts; it comes from a rank of this very job."""
        size = self.receive_bytes(8, source, tag, what).view(torch.int64)
        data = self.receive_bytes(int(size.item()), source, tag + 1, what)
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own job's rank


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory has been changed in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into one block of bytes on the CPU."""
    specs = [spec_of(tensor) for tensor in tensors]
    if len(tensors) > 1 and _is_uniform(specs):
        with torch.no_grad():
            return torch.stack(list(tensors)).cpu().reshape(-1).view(torch.uint8)
    packed = torch.empty(packed_bytes(specs), dtype=torch.uint8)
    for copy, tensor in zip(unpack(packed, specs), tensors, strict=True):
        copy.copy_(tensor.detach())
    return packed


def packed_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of a block that `pack` makes."""
    if _is_uniform(specs):
        return sum(spec.num_bytes for spec in specs)
    return sum(_aligned(spec.num_bytes) for spec in specs)


def unpack(packed: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return views into a block, each with the shape and dtype of its spec."""
    views, start, uniform = [], 0, _is_uniform(specs)
    for spec in specs:
        views.append(packed[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape))
        start += spec.num_bytes if uniform else _aligned(spec.num_bytes)
    return views


def unpack_copies(packed: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return copies of what lies in a block, which do not keep it alive."""
    if len(specs) > 1 and _is_uniform(specs):
        stacked = packed.view(specs[0].dtype).view(len(specs), *specs[0].shape)
        copies: tuple[torch.Tensor, ...] = torch.ops.aten.unbind_copy.int(stacked)
        return list(copies)
    return [view.clone() for view in unpack(packed, specs)]


def _is_uniform(specs: Sequence[TensorSpec]) -> bool:
    """Whether all are of one shape and dtype: such tensors lie one behind the other, without gaps."""
    first = specs[0] if specs else None
    return all(spec is first or (spec.shape, spec.dtype) == (first.shape, first.dtype) for spec in specs if first)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
