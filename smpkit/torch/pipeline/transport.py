"""Send values and gradients between the ranks of one pipeline.

All ranks number the moves of a microbatch alike, so a tag (microbatch, move, direction) is all a message needs: no
headers, no shapes, no handshakes. Compute never waits for a send; receives may be posted before they are needed.
Between GPUs that nccl connects, values and gradients take lanes, which need an order and headers: see `lanes.py`.

[Note: letting go of what was sent] gloo reads a tensor from another thread until the receiver has it, and cannot be
asked whether it is done; waiting for it could wait for a rank that waits for us. But who receives a message from a rank
knows what that rank has done before it sent it: everything earlier in its list of actions, hence all receives of those.
So each receive lets go of the sends to that rank that it must have taken before, without waiting for anything.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from smpkit.errors import SmpkitError, UsageError
from smpkit.torch import devices
from smpkit.torch.containers import pickled
from smpkit.torch.deadline import reason_of
from smpkit.torch.pipeline.absent import absent_gradient, is_absent
from smpkit.torch.pipeline.buffers import Buffers
from smpkit.torch.pipeline.messages import ABSENT, LEFT, Message, Sent, Tag, What, text_of, version_of
from smpkit.torch.pipeline.outbox import Outbox
from smpkit.torch.pipeline.record import MOVES_PER_MICROBATCH
from smpkit.torch.pipeline.specs import TensorSpec, permuted, relaid
from smpkit.torch.state import state

if TYPE_CHECKING:
    from smpkit.torch.pipeline.lanes import Arrival, Lanes
    from smpkit.torch.pipeline.record import Move
    from smpkit.torch.pipeline.timetable import Timetable

__all__ = ["MessageRecorder", "Place", "Transport"]

_log = logging.getLogger("smpkit")

MessageRecorder = Callable[[str, int, int, int, int, int], object]
"""Called with `(direction, peer, num_bytes, tag, start_ns, end_ns)`.

`direction` is "send" or "receive", `peer` a pp_rank, `tag` the same on both ends and in every step. A send lasts as
long as it kept its caller from other work, a receive from when its data was needed until it was there; times are
`time.perf_counter_ns()`.
"""

Place = tuple[int, bool, int, int]
"""An action by which something travels: its pp_rank, whether it is a backward, its segment and its microbatch."""

_GRACE_SECONDS: Final = 5.0
"""How long a rank that gives up a step waits for the others to do so, too, before it goes on with the exception."""
_UNWRITTEN: Final = -(1 << 62)
"""In a header that has not come."""
_END: Final = "the end of a step that was given up"
_NUM_SLOTS: Final = 1 << 17
"""Microbatches that have tags of their own; those of steps that were given up count too, see `Transport.abandon`."""


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
        device: where values live.
        lanes: the ways from GPU to GPU; values of ranks that none connects go through the hosts.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device, lanes: Lanes | None = None
    ) -> None:
        self._group = group
        self._ranks = list(ranks)
        self._rank = group.rank()
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._lanes = lanes
        self._begun: dict[int, Arrival | None] = {}
        """By tag, what is on its way in a lane to this rank or has arrived; None where the header says it all."""
        self._order: dict[int, int] | None = None
        """By tag, where in the timetable of this rank a message stands; None: whatever is sent, when it is sent."""
        self._coming: deque[tuple[int, int, Message]] = deque()
        """Sender, tag and message of what will come in lanes and has not begun, in the order of the timetable."""
        self._in_lanes = False
        """Whether a step runs in which messages take lanes."""
        self._has_left = False
        """Whether this rank has left them."""
        self._left: set[int] = set()
        """Ranks whose word that they have left has been read."""
        self._is_undrained = False
        """Whether a step was given up, and ranks have not been heard that may have sent something in it."""
        self._asked: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        """By rank, the receive of its next header, if that has begun."""
        self._timeout = state.timeout
        self._others = [peer for peer in range(len(self._ranks)) if peer != self._rank]
        self._sending: list[list[Sent]] = [[] for _ in self._ranks]
        self._orphans: list[object] = []
        self._num_abandoned = 0
        """Microbatches of steps that were given up; all ranks count alike, for none gives up a step alone."""
        self._posted: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self._buffers = Buffers()
        self.outbox = Outbox(self.send_bytes)
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
        self.awaits_data = False
        """Whether a receive lasts until its data are on the GPU: then it can be told from what is computed."""

    def connect(self, moves: Iterable[Move]) -> None:
        """Connect the GPUs between which values travel; all ranks call this with the same moves."""
        if self._lanes is not None:
            self._lanes.connect([(move.source, move.target) for move in moves])

    @property
    def has_lanes(self) -> bool:
        """Whether messages may travel from GPU to GPU."""
        return self._lanes is not None

    def follow(self, timetable: Timetable | None, over: Collection[int] = ()) -> None:
        """Let messages take lanes from now on to the end of the step; all ranks call this alike.

        Args:
            timetable: what this rank sends and receives. None: what it sends and receives takes lanes in the order of
                the calls, which is that of the program on all ranks.
            over: microbatches whose forward is over.
        """
        if self._lanes is None or not self._lanes.peers:
            return
        if self._is_undrained:
            self._drain()
            self._forget()
        if not self._in_lanes:
            self._in_lanes, self._has_left = True, False
            self._left.clear()
            if timetable is not None:
                self._lanes.begin_step(timetable.blocks)
        self._order = None
        self._coming.clear()
        if timetable is None:
            return
        self._order = {}
        for passage in timetable.passages:
            peer = passage.sender if passage.receiver == self._rank else passage.receiver
            if (passage.microbatch in over and not passage.backward) or not self._lanes.reaches(peer):
                continue
            tag = self._tag(passage.microbatch, passage.move, passage.backward)
            self._order[tag] = len(self._order)
            if peer == passage.sender and not self._has_left:
                self._coming.append((peer, tag, (passage.microbatch, passage.move, passage.backward)))

    def leave(self) -> None:
        """Let what is left of the step travel through the hosts: it goes another way than the timetable knows.

        All ranks do so when one does. Returns when all that others have sent before is on its way.
        """
        if not self._in_lanes or self._has_left:
            return
        self._say_left()
        self._drain()

    def _takes_lane(self, peer: int, tag: int) -> bool:
        """Return whether a message to or from a rank travels from GPU to GPU, as far as this rank knows."""
        if not self._in_lanes or self._lanes is None or not self._lanes.reaches(peer):
            return False
        return self._order is None or tag in self._order

    # --- values and gradients ------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, microbatch: int, move: Move, *, copy: bool = False) -> None:
        """Send a value forward.

        Args:
            copy: it may be changed in place before it has arrived.
        """
        tensor = permuted(tensor, move.spec.order)
        if copy and (self._on_cpu or self._in_lanes):  # through the hosts, a copy is what travels
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self._send_move(tensor, microbatch, move, backward=False)

    def send_gradient(self, gradient: torch.Tensor | None, microbatch: int, move: Move) -> None:
        """Send the gradient of a value back to where it came from, or word that it has none."""
        if gradient is None:
            in_lane = self._in_lanes and self._sends_in_lane(move.source, self._tag(microbatch, move, backward=True))
            outgoing = None if in_lane else absent_gradient(move.spec)
        else:
            outgoing = permuted(gradient.detach() if gradient.requires_grad else gradient, move.spec.order)
        self._send_move(outgoing, microbatch, move, backward=True)

    def post(self, microbatch: int, move: Move, *, backward: bool) -> None:
        """Start a receive before its data is needed; what takes a lane is on its way already."""
        tag = self._tag(microbatch, move, backward)
        if tag in self._posted:
            return
        if self._in_lanes and (tag in self._begun or self._awaits_lane(move.target if backward else move.source, tag)):
            return
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
        return self._recv(buffer, source, tag, lambda: f"{move.spec} for `{move.unit}`"), buffer

    def _recv(self, buffer: torch.Tensor, source: int, tag: int, what: Callable[[], str]) -> dist.Work:
        started = time.monotonic()
        try:
            return self._group.recv([buffer], source, tag)
        except RuntimeError as error:  # the connection is closed already
            raise reason_of(error, what(), [self._ranks[source]], started) from None

    def _send_move(self, tensor: torch.Tensor | None, microbatch: int, move: Move, *, backward: bool) -> None:
        recorder = self.recorder
        start_ns = 0 if recorder is None else time.perf_counter_ns()
        target, segment = (move.source, move.source_segment) if backward else (move.target, move.target_segment)
        tag = self._tag(microbatch, move, backward)
        taken_at = self.places.get((target, backward, segment, microbatch))
        what = (microbatch, move, backward)
        if self._lanes is not None and self._sends_in_lane(target, tag):
            self._send_in_lane(self._lanes, tensor, target, tag, what, taken_at)
        else:
            if tensor is None:  # this rank left just now
                tensor = absent_gradient(move.spec)
            self._send(tensor, target, tag, what, taken_at)
        if recorder is not None:
            num_bytes = 0 if tensor is None else tensor.nbytes
            recorder("send", target, num_bytes, tag, start_ns, time.perf_counter_ns())

    def _receive_move(
        self, microbatch: int, move: Move, use: Callable[[torch.Tensor], torch.Tensor], *, backward: bool
    ) -> torch.Tensor | None:
        source, segment = (move.target, move.target_segment) if backward else (move.source, move.source_segment)
        tag = self._tag(microbatch, move, backward)
        start_ns = time.perf_counter_ns()
        what = (microbatch, move, backward)
        if self._lanes is not None and self._comes_in_lane(source, tag, what):
            result = self._take_from_lane(self._lanes, tag, move.spec, use, start_ns)
        else:
            work, buffer = self._posted.pop(tag) if tag in self._posted else self._receiving(tag, move, backward)
            result = use(_as_made(buffer, move.spec)) if self._on_cpu else None
            start_ns = time.perf_counter_ns()
            self._wait(work, source, what)
            self.waited_ns += time.perf_counter_ns() - start_ns
            if backward and is_absent(buffer, move.spec):
                result = None
            elif result is None:
                result = use(_as_made(buffer.to(self._device), move.spec))
        if self._sending[source]:
            self._let_go(source, self.places.get((source, backward, segment, microbatch)))
        if self.recorder is not None:
            num_bytes = 0 if result is None and self._in_lanes and not self._has_left else move.spec.num_bytes
            self.recorder("receive", source, num_bytes, tag, start_ns, time.perf_counter_ns())
        return result

    def _tag(self, microbatch: int, move: Move, backward: bool) -> int:
        slot = (self._num_abandoned + microbatch) % _NUM_SLOTS
        return (slot * MOVES_PER_MICROBATCH + move.number) * 2 + backward

    def _send(self, tensor: torch.Tensor, target: int, tag: int, what: What, taken_at: int | None = None) -> None:
        outgoing = tensor.contiguous() if self._on_cpu else tensor.contiguous().cpu()
        self.num_messages += 1
        self.num_bytes += outgoing.nbytes
        started = time.monotonic()
        try:
            work = self._group.send([outgoing], target, tag)
        except RuntimeError as error:
            raise reason_of(error, text_of(what), [self._ranks[target]], started) from None
        self._sending[target].append(Sent(work, outgoing, version_of(outgoing), what, taken_at))

    # --- lanes -----------------------------------------------------------------------------------------------------

    def _sends_in_lane(self, target: int, tag: int) -> bool:
        """Return whether a message goes from GPU to GPU, when all that comes before it has begun to arrive."""
        if not self._takes_lane(target, tag):
            return False
        if self._order is not None:
            self._begin_until(self._order[tag])
        return not self._has_left

    def _awaits_lane(self, source: int, tag: int) -> bool:
        return self._takes_lane(source, tag) and source not in self._left

    def _comes_in_lane(self, source: int, tag: int, what: Message) -> bool:
        """Read headers until a message begins to arrive; return False if it comes through the hosts."""
        if tag not in self._begun and self._awaits_lane(source, tag):
            if self._order is not None:
                self._begin_until(self._order[tag] + 1)
            else:
                self._coming.append((source, tag, what))
                self._begin_next()
        return tag in self._begun

    def _begin_until(self, place: int) -> None:
        """Begin to receive all that comes before a place of the timetable."""
        assert self._order is not None, "there is a timetable"
        while self._coming and self._order[self._coming[0][1]] < place:
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin to receive what comes next, when its header says that it is on its way."""
        source, tag, what = self._coming.popleft()
        if source in self._left:
            return
        announced, num_bytes = self._header(source, what)
        if announced == LEFT:
            self._left.add(source)
            self.leave()
        elif announced == tag:
            self._begin(source, tag, num_bytes)
        else:
            raise UsageError(
                f"pipeline rank {source} has sent message {announced} where {text_of(what)} was due ({tag})",
                hint="the ranks of a pipeline run the same step, with the same configuration",
            )

    def _begin(self, source: int, tag: int, num_bytes: int) -> None:
        assert self._lanes is not None, "a message came in a lane"
        self._begun[tag] = self._lanes.receive(num_bytes, source) if num_bytes > 0 else None

    def _ask(self, source: int, what: What) -> tuple[dist.Work, torch.Tensor]:
        """Begin to receive the next header of a rank."""
        if source not in self._asked:
            header = torch.full((2,), _UNWRITTEN, device="cpu")
            self._asked[source] = self._recv(header, source, Tag.HEADERS, lambda: text_of(what)), header
        return self._asked[source]

    def _header(self, source: int, what: What) -> tuple[int, int]:
        """Wait for the next header of a rank; return which message it announces and how many bytes that has."""
        work, header = self._ask(source, what)
        del self._asked[source]
        self._wait(work, source, what)
        tag, num_bytes = header.tolist()
        return tag, num_bytes

    def _say_left(self) -> None:
        """Tell all ranks that this one is connected with that nothing more comes from it."""
        assert self._lanes is not None, "a step runs in lanes"
        self._has_left = True
        for peer in self._lanes.peers:
            self._send(torch.tensor([LEFT, 0], device="cpu"), peer, Tag.HEADERS, _END)

    def _next_source(self) -> int | None:
        """Return whose header is next; None if all ranks have left."""
        assert self._lanes is not None, "a step ran in lanes"
        while self._coming and self._coming[0][0] in self._left:
            self._coming.popleft()
        if self._coming:
            return self._coming[0][0]
        return next((peer for peer in self._lanes.peers if peer not in self._left), None)

    def _drain(self) -> None:
        """Read headers until all connected ranks have left, and begin to receive what they announce."""
        while (source := self._next_source()) is not None:
            self._read_next(source)
        self._is_undrained = False

    def _read_next(self, source: int) -> None:
        if self._coming:
            self._begin_next()
            return
        announced, _ = self._header(source, _END)
        if announced != LEFT:
            raise UsageError(
                f"pipeline rank {source} has sent message {announced} after all that was due",
                hint="the ranks of a pipeline run the same step, with the same configuration",
            )
        self._left.add(source)

    def _give_up_lanes(self) -> None:
        """Leave the lanes of a step that all ranks give up, so that no GPU waits for a partner for ever.

        Each receives what the others have sent, unless one is long in coming: then it does so when the next step
        begins.
        """
        if not self._has_left:
            self._is_undrained = True
            self._say_left()
        ends = time.monotonic() + min(_GRACE_SECONDS, self._timeout.total_seconds() / 4)
        while self._is_undrained and (source := self._next_source()) is not None:
            # gloo cannot be asked whether a message is there, and a wait that ends too soon closes the connection.
            header = self._ask(source, _END)[1]
            if _UNWRITTEN not in header.tolist():
                self._read_next(source)
            elif time.monotonic() > ends:
                _log.debug("A step was given up, and pipeline rank %s has not said so yet.", source)
                return
            else:
                time.sleep(0.001)
        self._is_undrained = False
        self._forget()

    def _forget(self) -> None:
        """Let go of what has come and nobody has taken."""
        for arrival in self._begun.values():
            if arrival is not None and self._lanes is not None:
                self._lanes.forget(arrival)
        self._begun.clear()

    def _send_in_lane(
        self, lanes: Lanes, tensor: torch.Tensor | None, target: int, tag: int, what: What, taken_at: int | None
    ) -> None:
        """Send a header and what it announces; the header alone where there is nothing to send."""
        num_bytes = ABSENT if tensor is None else tensor.nbytes
        header = torch.tensor([tag, num_bytes], device="cpu")
        self._send(header, target, Tag.HEADERS, what, taken_at)
        if tensor is None or not num_bytes:
            return
        self.num_messages += 1
        self.num_bytes += num_bytes
        sent = self._sending[target][-1]
        outgoing = tensor.contiguous()
        sent.header, sent.tensor, sent.version = header, outgoing, version_of(outgoing)
        sent.in_lane = lanes.send(outgoing, target)

    def _take_from_lane(
        self, lanes: Lanes, tag: int, spec: TensorSpec, use: Callable[[torch.Tensor], torch.Tensor], start_ns: int
    ) -> torch.Tensor | None:
        """Return what a message that has begun to arrive brings."""
        arrival = self._begun.pop(tag)
        if arrival is not None:
            value = lanes.arrived(arrival).view(spec.dtype).view(spec.shape)
            if self.awaits_data:
                devices.wait_for_stream(self._device)
        self.waited_ns += time.perf_counter_ns() - start_ns
        if arrival is None:
            if spec.num_bytes:
                return None
            value = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return use(_as_made(value.detach(), spec))

    def _wait(self, work: dist.Work, peer: int, what: What) -> None:
        self.outbox.settle()
        self.waiting_since = started = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if self.verdict is not None:
                raise self.verdict from None
            raise reason_of(error, text_of(what), [self._ranks[peer]], started) from None
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

    def _finish(self, sent: Sent, peer: int) -> None:
        self._wait(sent.work, peer, sent.what)
        if sent.in_lane is not None:  # who has taken the header has begun to receive
            sent.in_lane[0].wait()
        if version_of(sent.tensor) != sent.version:
            raise UsageError(
                f"a value was changed in place on its way to pipeline rank {peer}: {text_of(sent.what)}",
                hint="change a copy, for example `x = x.add(1)` instead of `x.add_(1)`",
            )

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        self.outbox.settle()
        for peer, sending in enumerate(self._sending):
            self._sending[peer] = []
            for sent in sending:
                self._finish(sent, peer)

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived, and keep no more memory than the step needed."""
        while self._in_lanes and self._coming:
            self._begin_next()
        self.flush()
        self._buffers.trim()
        if self._lanes is not None and (count := self._lanes.ring.num_unplanned):
            self._lanes.ring.num_unplanned = 0
            _log.debug("For %s messages of a step, memory was allocated while it ran.", count)
        self._forget()
        self._in_lanes = False

    def abandon(self, num_microbatches: int, *, alike: bool = True) -> None:
        """Forget what was interrupted; what is under way must not be taken for the next step's.

        An exception interrupts, and microbatches that stray from their record. All ranks must call this alike.
        Messages under way keep their memory, and nobody waits for them: another rank may have got less far and still
        take what was sent here; and a receive that goes away after gloo has announced it blocks its connection. It
        would also take a later message of its tag, so the tags of this step's microbatches are not used again.

        Args:
            num_microbatches: of the step that was interrupted.
            alike: whether all ranks call this now, or soon; else this rank has failed alone, or lost the others.
        """
        if self._in_lanes:
            self._in_lanes = False
            if alike:
                # Another error is on its way to the user already.
                with contextlib.suppress(SmpkitError, RuntimeError):
                    self._give_up_lanes()
        if alike:
            self.outbox.settle()  # others, which may have got further, count on it
        self._orphans += [sent for sending in self._sending for sent in sending]
        self._orphans += [*self._posted.values(), *self._begun.values()]
        for sending in self._sending:
            sending.clear()
        self._num_abandoned += num_microbatches
        self._posted.clear()
        self._begun.clear()
        self.places = {}

    # --- anything else of known size ---------------------------------------------------------------------------------

    def send_bytes(self, packed: torch.Tensor, target: int, tag: int) -> None:
        """Send a CPU tensor to one rank, which calls `receive_bytes` or `expect_bytes`; it must not change any more."""
        self._send(packed, target, tag, "bytes of the engine's own")

    def expect_bytes(self, num_bytes: int, source: int, tag: int, what: str) -> Callable[[], torch.Tensor]:
        """Start to receive bytes from one rank; return a function that waits for them and returns them."""
        packed = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        work = self._recv(packed, source, tag, lambda: what)

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
