"""A link with the semantics of a GPU's streams, for the checker: nothing is complete until the test completes it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch

from smpkit.torch.offload.emulated import ThreadWait
from smpkit.torch.offload.link import CopyBatch, Event


class Pending:
    """An event that is complete when the device has caught up."""

    def __init__(self, link: StreamLink) -> None:
        self._link, self._number = link, link.count

    def done(self) -> bool:
        return self._number < self._link.completed


class StreamLink:
    """Copies at once, reports that late, and lets the test choose the stream that computes.

    Whether the order was right is the checker's to say; time plays no part.
    """

    device = torch.device("cpu")
    is_stream_ordered = True
    min_bytes = 0
    out_bytes_per_second = back_bytes_per_second = 1e12
    latency_seconds = 0.0

    def __init__(self) -> None:
        self.count = self.completed = 0
        self._stream = "main"

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        previous, self._stream = self._stream, stream
        yield
        self._stream = previous

    def catch_up(self) -> None:
        self.completed = self.count

    def stream(self) -> Hashable:
        return self._stream

    def now(self, stream: Hashable = None) -> Event:
        self.count += 1
        return Pending(self)

    def send(self, copies: CopyBatch, after: Sequence[Event], what: str) -> Event:
        for source, target in copies:
            target.copy_(source)
        return self.now()

    fetch = send

    def wait(self, event: Event, what: str) -> ThreadWait:
        return ThreadWait(0.0)

    def before_reuse(self, event: Event, stream: Hashable) -> None:
        pass

    def record_stream(self, data: torch.Tensor, stream: Hashable) -> None:
        pass

    def synchronize(self, event: Event, what: str) -> None:
        pass

    def stamp(self) -> int:
        return self.count

    def seconds_between(self, first: int, last: int) -> float:
        return float(last - first)

    def close(self) -> None:
        self.catch_up()
