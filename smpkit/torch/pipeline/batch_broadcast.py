"""Give every rank of a pipeline the arguments of pp_rank 0, as SMP v1 did.

The ranks relay them, since each needs them later than the one before; pp_rank 0 sends one message and waits for
nobody::

    head                                                                          rest
    header | what the arguments are, when they are new | as much as fits of       the tensors

The head is as long as the message of the step before, which all ranks know, so it most often holds everything. What the
arguments are (`StepArguments`) travels once for each kind of them; after that their digest in the header is enough. So
what another rank has passed itself does not matter: it may be a dummy of another shape.

On all ranks, pp_rank 0 included, the tensors are dense and in the memory order of those of pp_rank 0: results of calls
depend on strides, and a rank that took `batch[:, :-1]` for another kind of argument than the others would wait for them
for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.announce import announce
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import TensorSpec, as_layout, map_tensors, spec_of, to_layout
from smpkit.torch.core.warn import warn_user
from smpkit.torch.pipeline.messages import Tag, aligned, packed_bytes, unpack
from smpkit.torch.pipeline.step_arguments import StepArguments, key_of
from smpkit.torch.pipeline.transport import Transport

__all__ = ["FIRST_BYTES", "MAX_KINDS", "InputBroadcast"]

FIRST_BYTES: Final = 64 * 1024
"""Size of the head in the first step; also its largest size."""
MAX_KINDS: Final = 256
"""Kinds of arguments that all ranks remember, the least recently used first to go."""
_HEADER_BYTES: Final = 32
"""Digest, size of the description, size of the whole message; with padding, so that what follows is aligned."""
_COMPARED_CALLS: Final = 2
"""How many calls have their values compared: data that is sharded wrongly differs from the first on."""
_WHAT: Final = "the inputs of the step"

_Key = TypeVar("_Key", bound=Hashable)


class _RecentArguments(OrderedDict[_Key, StepArguments], Generic[_Key]):
    """The latest kinds of arguments.

    All ranks use them in the order of the steps, so all remember the same ones, and pp_rank 0 knows which.
    """

    def use(self, key: _Key) -> StepArguments | None:
        """Return what is remembered under a key."""
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found

    def add(self, key: _Key, arguments: StepArguments) -> None:
        """Remember new ones, and forget those that were not used for longest."""
        self[key] = arguments
        if len(self) > MAX_KINDS:
            self.popitem(last=False)


class _Frame(NamedTuple):
    """A message in memory, with a view for each tensor."""

    arguments: StepArguments
    is_description: bool
    """Whether it says what the arguments are, which the next one need not."""
    block: torch.Tensor
    views: list[torch.Tensor]


class InputBroadcast:
    """The inputs of a pipeline's steps on this rank.

    Args:
        transport: the way to the neighbours.
        rank, size: pp_rank and pp_size.
        device: where they are used.
        reports: whether this rank says, once, that it has passed other inputs than pp_rank 0.
    """

    def __init__(
        self, transport: Transport, rank: int, size: int, device: torch.device, *, reports: bool = False
    ) -> None:
        self.head_bytes = FIRST_BYTES
        """Size of the message that begins a step, the same on all ranks."""
        self._transport = transport
        self._rank = rank
        self._size = size
        self._device = device
        self._next_head_bytes = FIRST_BYTES
        self._sent: _RecentArguments[tuple[Any, ...]] = _RecentArguments()
        """On pp_rank 0: by key, the arguments that the others know."""
        self._received: _RecentArguments[int] = _RecentArguments()
        """On the others: by digest."""
        self._frame: _Frame | None = None
        """The one of the step before, which most often fits again: the pipeline waits while pp_rank 0 makes one."""
        self._in_flight: _Frame | None = None
        self._comparison = _Comparison() if reports else None

    def broadcast(self, call: str, arguments: Any) -> Any:
        """Return the arguments of pp_rank 0; all ranks of the pipeline call this.

        Args:
            call: names the step and what else decides what runs, in words.
            arguments: what this rank has passed; pp_rank 0's tensors must be strided.

        Raises:
            UsageError: pp_rank 0 calls something else, or passed an object that this rank must have of its own.
        """
        return self._send(call, arguments) if self._rank == 0 else self._receive(call, arguments)

    def end_step(self) -> None:
        """Note that a step has ended well: its messages have arrived, and all ranks know the size of the next head."""
        self.head_bytes = self._next_head_bytes
        frame, self._in_flight = self._in_flight, None
        is_reusable = frame is not None and not frame.is_description and len(frame.block) <= FIRST_BYTES
        self._frame = frame if is_reusable else None

    # --- pp_rank 0 ---------------------------------------------------------------------------------------------------

    def _send(self, call: str, arguments: Any) -> Any:
        key, tensors = key_of(call, arguments)
        described = self._sent.use(key)
        description = b""
        if described is None:
            described = StepArguments.of(key, arguments, tensors)
            self._sent.add(key, described)
            description = described.to_bytes()
        in_order = [
            to_layout(tensor.clone() if tensor.is_inference() else tensor.detach(), spec.order)
            for tensor, spec in zip(tensors, described.specs, strict=True)
        ]
        block = self._pack(described, description, in_order)
        on_device = any(devices.is_asynchronous(tensor.device) for tensor in in_order)
        ready = devices.record_event(self._device) if on_device else None
        self._relay(described, block[: self.head_bytes], block[self.head_bytes :], ready)
        moved = [devices.to_device(tensor, self._device) for tensor in in_order]
        same = {id(tensor): other for tensor, other in zip(tensors, moved, strict=True)}
        return map_tensors(lambda tensor: same.get(id(tensor), tensor), arguments)

    def _pack(self, arguments: StepArguments, description: bytes, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes that travel. Nobody may write to them before `end_step`: gloo reads them until then."""
        begin = _HEADER_BYTES + aligned(len(description))
        num_bytes = begin + packed_bytes(arguments.specs)
        self._next_head_bytes = min(FIRST_BYTES, _HEADER_BYTES + packed_bytes(arguments.specs))
        block_bytes = max(num_bytes, self.head_bytes)
        frame, self._frame = self._frame, None
        if description or frame is None or frame.arguments is not arguments or len(frame.block) != block_bytes:
            frame = self._new_frame(arguments, description, num_bytes, block_bytes)
        with torch.no_grad():
            for view, tensor in zip(frame.views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
        self._in_flight = frame
        return frame.block

    def _new_frame(self, arguments: StepArguments, description: bytes, num_bytes: int, block_bytes: int) -> _Frame:
        block = devices.host_memory(block_bytes, self._device).zero_()
        header = [arguments.digest, len(description), num_bytes]
        block[:24].view(torch.int64).copy_(torch.tensor(header, dtype=torch.int64, device="cpu"))
        if description:
            data = torch.frombuffer(bytearray(description), dtype=torch.uint8)
            block[_HEADER_BYTES : _HEADER_BYTES + len(description)].copy_(data)
        begin = _HEADER_BYTES + aligned(len(description))
        return _Frame(arguments, bool(description), block, _laid_out(block[begin:num_bytes], arguments.specs))

    # --- the others --------------------------------------------------------------------------------------------------

    def _receive(self, call: str, own: Any) -> Any:
        source = self._rank - 1
        head = self._transport.receive_bytes(self.head_bytes, source, Tag.INPUTS_HEAD + self.head_bytes, _WHAT)
        digest, description_bytes, num_bytes = head[:24].view(torch.int64).tolist()
        rest = head[:0]
        if num_bytes > len(head):
            rest = self._transport.receive_bytes(num_bytes - len(head), source, _rest_tag(digest), _WHAT)
        begin = _HEADER_BYTES + aligned(description_bytes)
        # A copy, since the messages are still being sent to the next rank, and a step may change its inputs.
        block = devices.host_memory(num_bytes - _HEADER_BYTES, self._device)
        torch.cat([head[_HEADER_BYTES:num_bytes], rest], out=block)
        arguments = self._received.use(digest)
        if description_bytes:
            arguments = StepArguments.from_bytes(block[:description_bytes].numpy().tobytes())
            self._received.add(digest, arguments)
        assert arguments is not None, "pipeline rank 0 remembers arguments that this rank has forgotten"
        self._relay(arguments, head, rest)
        self._next_head_bytes = min(FIRST_BYTES, num_bytes - begin + _HEADER_BYTES)
        if arguments.call != call:
            raise UsageError(
                f"pipeline rank {self._rank} called {call}, and pipeline rank 0 {arguments.call}",
                hint="all ranks of a pipeline call the same steps in the same order and mode",
            )
        arrived = _laid_out(block[begin - _HEADER_BYTES :], arguments.specs)
        if self._comparison is not None and self._comparison.calls_left:
            self._comparison.compare(call, self._rank, own, arguments, arrived)
        return arguments.filled([tensor.to(self._device, non_blocking=True) for tensor in arrived], own, self._rank)

    def _relay(
        self, arguments: StepArguments, head: torch.Tensor, rest: torch.Tensor, ready: torch.Event | None = None
    ) -> None:
        if self._rank < self._size - 1:
            self._transport.outbox.send(head, self._rank + 1, Tag.INPUTS_HEAD + len(head), ready)
            if len(rest):
                self._transport.outbox.send(rest, self._rank + 1, _rest_tag(arguments.digest), ready)


class _Comparison:
    """Says once if this rank has passed other inputs to its first steps than pp_rank 0, whose inputs count."""

    def __init__(self) -> None:
        self.calls_left = _COMPARED_CALLS

    def compare(
        self, call: str, rank: int, own: Any, arguments: StepArguments, arrived: Sequence[torch.Tensor]
    ) -> None:
        self.calls_left -= 1
        _, tensors = key_of(call, own)
        shapes, expected = _shapes([spec_of(tensor) for tensor in tensors]), _shapes(arguments.specs)
        if shapes != expected:
            self.calls_left = 0
            announce([f"pipeline rank {rank} passed {shapes} to {call}; it uses {expected} of pipeline rank 0."])
        elif not all(map(_has_same_bytes, tensors, arrived)):
            self.calls_left = 0
            warn_user(
                f"pipeline rank {rank} passed other values to {call} than pipeline rank 0, whose values are used: shard"
                " data by smp.dp_rank() of smp.dp_size(), not by smp.rank(), or a part of it is never trained on",
                by_rank=state.rank,
            )


def _has_same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    both = [each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other)]
    return torch.equal(*both)


def _laid_out(block: torch.Tensor, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Return views of the tensors in a block, each with the memory order of its spec."""
    parts = unpack(block, specs)
    return [as_layout(part, spec.shape, spec.order) for part, spec in zip(parts, specs, strict=True)]


def _rest_tag(digest: int) -> int:
    return Tag.INPUTS_REST + (digest & 0xFFFFFF)


def _shapes(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "no tensors"
