"""What the engine needs of a device: two copy streams beside the stream that computes, and events between them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from smpkit.torch.core import devices

__all__ = ["DONE", "CopyBatch", "Event", "Link", "Wait", "link_for"]


class CopyBatch:
    """Copies made together: contiguous tensors, each target with the type and size of its source."""

    __slots__ = ("sources", "targets")

    def __init__(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        self.sources = sources
        self.targets = targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.sources, self.targets, strict=True)

    def run(self, *, non_blocking: bool = False) -> None:
        """Make them on the current stream."""
        if len(self.sources) == 1:
            self.targets[0].copy_(self.sources[0], non_blocking=non_blocking)
        else:
            # One call of torch takes half the processor time of one for each. Between devices it runs `copy_` for each
            # pair; torch's optimizers and FSDP use it, too.
            torch._foreach_copy_(self.targets, self.sources, non_blocking=non_blocking)


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Return whether that work is complete; does not block."""


class Wait(Protocol):
    """The cost of a wait."""

    @property
    def seconds(self) -> float | None:
        """How long compute stood still; None as long as that is unknown."""

    @property
    def stamps(self) -> tuple[Any, Any] | None:
        """When it began and ended, by the device's clock (`Link.stamp`); None: this thread waited."""


class Link(Protocol):
    """A device's link to host memory.

    `send` and `fetch` return at once. Copies of one direction are made in order; the two directions do not wait for
    each other. Everything else is ordered by events alone: a copy waits for those in `after`.
    """

    device: torch.device
    is_stream_ordered: bool
    """Whether this thread runs ahead of the device, so that work is enqueued long before it is done."""
    min_bytes: int
    """Smaller tensors are not worth a copy."""
    out_bytes_per_second: float
    back_bytes_per_second: float
    latency_seconds: float

    def stream(self) -> Hashable:
        """Return the stream that computes now; it may change between two calls."""

    def now(self, stream: Hashable = None) -> Event:
        """Return an event of all work enqueued so far on a stream; None: the current one."""

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy from the device to the host when `after` is complete; `what` is named in errors."""

    def fetch(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        """Copy from the host to the device when `after` is complete."""

    def wait(self, event: Event, what: str) -> Wait:
        """Make work that is enqueued on the current stream from now on run after `event`."""

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        """Make memory of `stream` that is freed from now on reusable only after `event`."""

    def record_stream(self, data: Tensor, stream: Hashable) -> None:
        """Keep memory that another stream may own, and that is about to be freed, until `stream` has used it."""

    def synchronize(self, event: Event, what: str) -> None:
        """Block this thread until `event`; raises DeadlineError, and errors of the copy."""

    def stamp(self) -> Any:
        """Return a time stamp of the current stream."""

    def seconds_between(self, first: Any, last: Any) -> float | None:
        """Return the time between two stamps; None if the device has not reached them yet."""

    def close(self) -> None:
        """End threads and streams after the copies that are under way."""


class _Done:
    """The event of work that is complete."""

    def done(self) -> bool:
        return True


DONE: Final[Event] = _Done()


def link_for(device: torch.device, deadline_seconds: float) -> Link:
    """Return the link of a device; the CPU's copies in place.

    Args:
        deadline_seconds: no wait of this thread for a copy lasts longer.
    """
    if devices.has_streams(device):
        from smpkit.torch.offload.accelerator import AcceleratorLink

        return AcceleratorLink(device, deadline_seconds)
    from smpkit.torch.offload.emulated import EmulatedLink

    return EmulatedLink(deadline_seconds=deadline_seconds)
