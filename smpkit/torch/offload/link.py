"""What the engine needs of a device: two copy streams beside the stream that computes, and events between them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

__all__ = ["DONE", "CopyBatch", "Event", "Link", "Wait", "link_for"]


class CopyBatch:
    """Copies to be made together: contiguous tensors, each target of its source's type and size."""

    __slots__ = ("sources", "targets")

    def __init__(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        self.sources = sources
        self.targets = targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.sources, self.targets, strict=True)

    def run(self, *, non_blocking: bool = False) -> None:
        """Make them on the current stream, in one call of torch: a call for each takes twice the processor time."""
        if len(self.sources) == 1:
            self.targets[0].copy_(self.sources[0], non_blocking=non_blocking)
        else:
            # Between devices this is `copy_` for one after the other, as torch's optimizers and FSDP use it.
            torch._foreach_copy_(self.targets, self.sources, non_blocking=non_blocking)


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Return whether that work is complete, as this thread sees it now."""


class Wait(Protocol):
    """What a wait has cost."""

    @property
    def seconds(self) -> float | None:
        """How long compute stood still; None while that is not known."""


class Link(Protocol):
    """A device's link to host memory.

    `send` and `fetch` return at once. Copies of one direction are made in order; the two directions do not wait for
    each other. Nothing else is ordered but by events: what must come before a copy is said in `after`.
    """

    device: torch.device
    is_stream_ordered: bool
    """Whether this thread runs ahead of the device, so that `done()` tells of work enqueued long before."""
    min_bytes: int
    """Smaller tensors are not worth a copy."""
    out_bytes_per_second: float
    back_bytes_per_second: float
    latency_seconds: float

    def stream(self) -> Hashable:
        """Return the stream that computes now; asked at each use, never kept from another one."""

    def now(self, stream: Hashable = None) -> Event:
        """Return an event of all that a stream, None for the current one, has been given so far."""

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy from the device to the host when `after` is complete; `what` is named in errors."""

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy from the host to the device when `after` is complete."""

    def wait(self, event: Event, what: str) -> Wait:
        """Let what the current stream is given from now on run after `event`."""

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        """Let memory of `stream` that is freed from now on be used again after `event` only."""

    def record_stream(self, data: Tensor, stream: Hashable) -> None:
        """Let memory that is about to be freed and may belong to another stream's allocator wait for `stream` then."""

    def synchronize(self, event: Event, what: str) -> None:
        """Let this thread wait for `event`; raises DeadlineError, and errors of the copy."""

    def stamp(self) -> Any:
        """Return a mark in the current stream's time."""

    def seconds_between(self, first: Any, last: Any) -> float | None:
        """Return the time between two stamps; None while the device is not there yet."""

    def close(self) -> None:
        """End threads and streams; what was given is completed first."""


class _Done:
    """The event of work that is complete."""

    def done(self) -> bool:
        return True


DONE: Final[Event] = _Done()


def link_for(device: torch.device, deadline_seconds: float) -> Link:
    """Return the link of a device: of a GPU its own, of the CPU one that copies in place.

    Args:
        deadline_seconds: no wait of this thread for a copy lasts longer.
    """
    if device.type == "cuda":
        from smpkit.torch.offload.cuda import CudaLink

        return CudaLink(device, deadline_seconds)
    from smpkit.torch.offload.emulated import EmulatedLink

    return EmulatedLink(deadline_seconds=deadline_seconds)
