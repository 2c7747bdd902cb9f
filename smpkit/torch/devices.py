"""Streams and events of a device that computes on its own, such as a GPU, after the host has told it what to do.

Code that must order copies, messages or measurements takes them from here, so that one file says how torch names them.
On a CPU, whose work is done when a call returns, every function does nothing and returns None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["current_stream", "is_asynchronous", "new_stream", "on_stream", "record_event", "wait_for_stream"]


def is_asynchronous(device: torch.device) -> bool:
    """Return whether calls return before the device has computed what they ask for."""
    return device.type not in ("cpu", "meta")


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that the device's operators go to now, in this thread."""
    return torch.accelerator.current_stream(device) if is_asynchronous(device) else None


def new_stream(device: torch.device, *, high_priority: bool = False) -> torch.Stream | None:
    """Return a stream beside the current one; at high priority its kernels start before those of others."""
    return torch.Stream(device, priority=-1 if high_priority else 0) if is_asynchronous(device) else None


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Send operators of this thread to a stream; None: leave it as it is.

    Unlike `with stream`, one stream may be entered by several threads, and again inside itself.
    """
    if stream is None:
        yield
        return
    # `set_stream` makes the stream's device the current one; a thread that had another must get it back.
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def record_event(device: torch.device, *, keeps_time: bool = False) -> torch.Event | None:
    """Return an event of all that the current stream has been given so far."""
    if not is_asynchronous(device):
        return None
    event = torch.Event(device, enable_timing=keeps_time)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait_for_stream(device: torch.device) -> None:
    """Hold up the host until the current stream has computed what it was given.

    Never the whole device: two ranks that send to each other would both wait for the other to receive.
    """
    if (stream := current_stream(device)) is not None:
        stream.synchronize()
