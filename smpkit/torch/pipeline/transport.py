"""Send values and gradients between the ranks of one pipeline.

All ranks number the moves of a microbatch alike, so a tag (microbatch, move, direction) is all a message needs: no
headers, no shapes, no handshakes. Sends are never waited for by compute; receives may be posted before they are needed.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from smpkit.torch.deadline import waiting
from smpkit.torch.state import state

if TYPE_CHECKING:
    from smpkit.torch.pipeline.microbatch import Move

__all__ = ["MessageRecorder", "Transport"]

_MOVES_PER_MICROBATCH: Final = 1 << 12
_TEMPLATE_TAG: Final = (1 << 30) + 1
_Key = tuple[int, int, bool]

MessageRecorder = Callable[[str, int, int, int, int, int], object]
"""Called with `(direction, peer, num_bytes, tag, start_ns, end_ns)`.

`direction` is "send" or "receive", `peer` a pp_rank, `tag` the same on both ends and in every step. A send lasts as
long as it kept its caller from other work, a receive from when its data was needed until it was there; times are
`time.perf_counter_ns()`.
"""


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
        self._window = 4 * len(self._ranks)
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._posted: dict[_Key, tuple[dist.Work, torch.Tensor]] = {}
        self.num_messages = 0
        self.num_bytes = 0
        self.recorder: MessageRecorder | None = None
        """Told of every value and gradient that is sent or received; None costs nothing."""

    # --- values and gradients ------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, microbatch: int, move: Move) -> None:
        """Send a value forward."""
        self._send(tensor, move.target, _tag(microbatch, move.number, backward=False))

    def send_gradient(self, gradient: torch.Tensor, microbatch: int, move: Move) -> None:
        """Send the gradient of a value back to where it came from."""
        self._send(gradient.detach(), move.source, _tag(microbatch, move.number, backward=True))

    def post(self, microbatch: int, move: Move, *, backward: bool) -> None:
        """Start a receive before its data is needed."""
        key = (microbatch, move.number, backward)
        if key not in self._posted:
            buffer = torch.empty(move.spec.shape, dtype=move.spec.dtype)
            source = move.target if backward else move.source
            work = self._group.recv([buffer], source, _tag(microbatch, move.number, backward=backward))
            self._posted[key] = (work, buffer)

    def receive(self, microbatch: int, move: Move) -> torch.Tensor:
        """Return a value that another rank sends."""
        what = f"forward of microbatch {microbatch} ({move.spec})"
        return self._receive(microbatch, move, move.source, what, backward=False)

    def receive_gradient(self, microbatch: int, move: Move) -> torch.Tensor:
        """Return the gradient of a value that was sent."""
        what = f"backward of microbatch {microbatch} (gradient of {move.spec})"
        return self._receive(microbatch, move, move.target, what, backward=True)

    def _send(self, tensor: torch.Tensor, target: int, tag: int) -> None:
        start_ns = time.perf_counter_ns()
        outgoing = tensor.contiguous().cpu()
        self.num_messages += 1
        self.num_bytes += outgoing.nbytes
        # The tensor is kept until the send is complete: gloo reads it from another thread.
        self._sending.append((self._group.send([outgoing], target, tag), outgoing))
        while len(self._sending) > self._window:
            self._finish_oldest_send()
        self._record("send", target, outgoing.nbytes, tag, start_ns)

    def _receive(self, microbatch: int, move: Move, source: int, what: str, *, backward: bool) -> torch.Tensor:
        start_ns = time.perf_counter_ns()
        self.post(microbatch, move, backward=backward)
        work, buffer = self._posted.pop((microbatch, move.number, backward))
        with waiting(what, [self._ranks[source]]):
            work.wait(state.timeout)
        arrived = buffer.to(self._device)
        self._record("receive", source, buffer.nbytes, _tag(microbatch, move.number, backward=backward), start_ns)
        return arrived

    def _record(self, direction: str, peer: int, num_bytes: int, tag: int, start_ns: int) -> None:
        if self.recorder is not None:
            self.recorder(direction, peer, num_bytes, tag, start_ns, time.perf_counter_ns())

    def _finish_oldest_send(self) -> None:
        work, _ = self._sending.popleft()
        with waiting("the send of a value", self._ranks):
            work.wait(state.timeout)

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        while self._sending:
            self._finish_oldest_send()

    def abandon(self) -> None:
        """Forget what an exception interrupted."""
        self._sending.clear()
        self._posted.clear()

    # --- structures, once per kind of call -------------------------------------------------------------------------

    def broadcast_object(self, value: Any) -> None:
        """Send a Python object to every other rank of the pipeline, each of which calls `receive_object`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        for target in range(len(self._ranks)):
            if target != self._rank:
                self._send(size, target, _TEMPLATE_TAG)
                self._send(data, target, _TEMPLATE_TAG + 1)

    def receive_object(self, source: int, what: str) -> Any:
        """Return the Python object that rank `source` broadcasts; it comes from a rank of this very job."""
        size = torch.empty(1, dtype=torch.int64)
        with waiting(what, [self._ranks[source]]):
            self._group.recv([size], source, _TEMPLATE_TAG).wait(state.timeout)
            data = torch.empty(int(size.item()), dtype=torch.uint8)
            self._group.recv([data], source, _TEMPLATE_TAG + 1).wait(state.timeout)
        return pickle.loads(data.numpy().tobytes())  # noqa: S301 - our own job's rank

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor of rank `source`, on every rank; all must call, with equal shapes."""
        staged = tensor.contiguous().cpu()
        with waiting("the outputs of the step", self._ranks):
            dist.broadcast(staged, group=self._group, group_src=source)
        return staged.to(self._device)


def _tag(microbatch: int, number: int, *, backward: bool) -> int:
    assert number < _MOVES_PER_MICROBATCH, "more moves in one microbatch than tags"
    return (microbatch * _MOVES_PER_MICROBATCH + number) * 2 + backward
