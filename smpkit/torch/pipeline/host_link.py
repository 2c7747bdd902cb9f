"""Send tensors between the hosts of one pipeline's ranks, over gloo.

A tag of microbatch, transfer and direction is all that a value or gradient needs, since all ranks number the transfers
of a microbatch alike: no headers, no shapes, no handshakes. Compute never waits for a send; receives may be posted
before they are needed.

[Note: sent tensors] gloo reads a tensor from another thread until the receiver has it, and cannot be asked whether it
is done; waiting for it could wait for a rank that waits for us. So a sent value is held until its gradient comes, which
says that it has arrived, and everything else until the step ends.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from smpkit.errors import UnsupportedError, UsageError
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tensor_spec import version_of
from smpkit.torch.core.tree import pickled
from smpkit.torch.distributed.deadline import explain_error
from smpkit.torch.pipeline.messages import (
    TRANSFERS_PER_MICROBATCH,
    Message,
    MessageLabel,
    Tag,
    is_none_gradient,
    laid_out,
    none_gradient_message,
)

_LAST_FIRST_TAG: Final = (1 << 30) - (1 << 28)
"""The largest first tag of a step: the tags of 4,096 microbatches still fit below those of `Tag`."""


class SentTensor(NamedTuple):
    """A tensor under way: it must not change in place before it has arrived."""

    work: dist.Work
    tensor: torch.Tensor
    version: int
    target: int
    what: MessageLabel

    def refuse_change(self) -> None:
        """Raise if the tensor has been changed since it was sent."""
        if version_of(self.tensor) != self.version:
            raise UsageError(
                f"a value was changed in place on its way to pipeline rank {self.target}: {self.what}",
                hint="change a copy, for example `x = x.add(1)` instead of `x.add_(1)`",
            )


class HostLink:
    """One rank's host, connected with those of all others.

    Args:
        group: of the pipeline's ranks, for CPU tensors.
        ranks: their global ranks, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        self.ranks = list(ranks)
        """The ranks of the job by pp_rank."""
        self._group = group
        self._device = device
        self._timeout = state.timeout
        self._others = [peer for peer in range(len(self.ranks)) if peer != group.rank()]
        self._values: dict[int, SentTensor] = {}
        """By number of the message, values whose gradient has not come: see [Note: sent tensors]."""
        self._sent: list[SentTensor] = []
        """Everything else that was sent in this step."""
        self._posted: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        """By number, receives that have begun."""
        self._forgotten: list[object] = []
        """Receives that were posted and forgotten."""
        self._first_tag = 0
        """Where tags begin, beyond those of forgotten receives; all ranks count alike."""
        self.waiting_since: float | None = None
        """Since when this rank has been waiting for another, of `time.monotonic()`."""
        self.failure: UsageError | None = None
        """Why the wait cannot end, once the watch for divergence has found out."""

    # --- values and gradients ------------------------------------------------------------------------------------

    def tag_of(self, message: Message) -> int:
        """Return the tag of a value or gradient, the same on both ends."""
        return self._first_tag + message.number

    def send(self, tensor: torch.Tensor | None, message: Message) -> None:
        """Send a value or gradient; None is that of a value without gradient."""
        if tensor is None:
            tensor = none_gradient_message(message.transfer.spec)
        sent = self._send(tensor.contiguous().to("cpu"), message.receiver, self.tag_of(message), message)
        if message.backward:
            self._sent.append(sent)
        else:
            self._values[message.number] = sent

    def post(self, message: Message) -> None:
        if message.number not in self._posted:
            self._posted[message.number] = self._begin_receive(message)

    def receive(self, message: Message) -> torch.Tensor | None:
        spec = message.transfer.spec
        posted = self._posted.pop(message.number, None)
        work, buffer = self._begin_receive(message) if posted is None else posted
        self._wait(work, message.sender, message)
        if message.backward:
            # The receiver has sent the gradient, so the value has arrived.
            if (sent := self._values.pop(message.number - 1, None)) is not None:
                self._release(sent)
            if is_none_gradient(buffer, spec):
                return None
        return laid_out(buffer.to(self._device), spec)

    def _begin_receive(self, message: Message) -> tuple[dist.Work, torch.Tensor]:
        spec = message.transfer.spec
        buffer = torch.empty_strided(spec.shape, spec.dense_stride, dtype=spec.dtype, device="cpu")
        return self._recv(buffer, message.sender, self.tag_of(message), message), buffer

    def forget_posted(self, num_microbatches: int) -> None:
        """Forget receives in which nothing will arrive: microbatches have left the record that they were posted for.

        All ranks must call this, with the number of microbatches of the step.
        """
        # Keep their memory: a receive that goes away after gloo has announced it blocks its connection.
        self._forgotten += self._posted.values()
        self._posted.clear()
        # It would also take a later message of its tag: never use the tags of these microbatches again.
        self._first_tag += 2 * TRANSFERS_PER_MICROBATCH * num_microbatches
        if self._first_tag > _LAST_FIRST_TAG:
            raise UnsupportedError(
                "microbatches took another way than the recorded one in so many kinds of step that no tags are left for"
                f" their messages: {self._first_tag // (2 * TRANSFERS_PER_MICROBATCH):,} microbatches in all",
                hint="hand the same layers the same shapes in each step (padding), or start from a checkpoint",
            )

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        for sent in (*self._values.values(), *self._sent):
            self._release(sent)
        self._values.clear()
        self._sent.clear()

    # --- anything else -------------------------------------------------------------------------------------------

    def send_bytes(self, data: torch.Tensor, target: int, tag: int, what: MessageLabel) -> None:
        """Send a CPU tensor, which must not change any more, to a rank that calls `receive_bytes`."""
        self._sent.append(self._send(data, target, tag, what))

    def receive_bytes(self, num_bytes: int, source: int, tag: int, what: MessageLabel) -> torch.Tensor:
        """Return the bytes that one rank sends."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._wait(self._recv(data, source, tag, what), source, what)
        return data

    def send_object(
        self,
        value: Any,
        targets: Sequence[int] | None = None,
        tag: int = Tag.OBJECT,
        what: str = "what a call returns",
    ) -> None:
        """Send a Python object to every other rank of the pipeline, or some; each of them calls `receive_object`."""
        data = torch.frombuffer(bytearray(pickled(value)), dtype=torch.uint8)
        size = torch.tensor([len(data)], device="cpu").view(torch.uint8)
        for target in self._others if targets is None else targets:
            self.send_bytes(size, target, tag, what)
            self.send_bytes(data, target, tag + 1, what)

    def receive_object(self, source: int, what: str, tag: int = Tag.OBJECT) -> Any:
        """Return the Python object that rank `source` sends; it comes from a rank of this very job."""
        size = self.receive_bytes(8, source, tag, what).view(torch.int64)
        data = self.receive_bytes(int(size), source, tag + 1, what)
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own job's rank

    # --- gloo ----------------------------------------------------------------------------------------------------

    def _send(self, data: torch.Tensor, target: int, tag: int, what: MessageLabel) -> SentTensor:
        try:
            return SentTensor(self._group.send([data], target, tag), data, version_of(data), target, what)
        except RuntimeError as error:
            raise self._explained(error, what, target) from None

    def _recv(self, buffer: torch.Tensor, source: int, tag: int, what: MessageLabel) -> dist.Work:
        try:
            return self._group.recv([buffer], source, tag)
        except RuntimeError as error:
            raise self._explained(error, what, source) from None

    def _release(self, sent: SentTensor) -> None:
        self._wait(sent.work, sent.target, sent.what)
        sent.refuse_change()

    def _wait(self, work: dist.Work, peer: int, what: MessageLabel) -> None:
        self.waiting_since = started = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            if self.failure is not None:
                raise self.failure from None
            raise self._explained(error, what, peer, started) from None
        self.waiting_since = None

    def _explained(self, error: RuntimeError, what: MessageLabel, peer: int, started: float | None = None) -> Exception:
        since = time.monotonic() if started is None else started
        return explain_error(error, str(what), [self.ranks[peer]], since)
