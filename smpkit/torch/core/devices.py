"""Streams, events, copies and random numbers of an asynchronous device, such as a GPU.

The host queues work on the device and goes on. Code that must order copies, messages or measurements does so through
this module, so that it alone names torch's functions for it. On a CPU, whose work has ended when a call returns, there
is nothing to order: the functions for streams and events do nothing and return None.

[Note: copies that do not block the host] A copy between a device and pageable memory makes the host wait for everything
queued on the stream. From and to pinned memory it is only queued; then that memory must not be written, or read, before
the copy has ended. The user's code does not know that, so the user's tensors are copied into pinned memory of our own
first, even if they are pinned. Torch's allocator of pinned memory records the copies that use a block, and reuses it
only when they have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

__all__ = [
    "current_device",
    "current_stream",
    "default_generator",
    "fork_rng",
    "has_happened",
    "host_memory",
    "is_asynchronous",
    "make_current",
    "new_stream",
    "on_stream",
    "order_after",
    "record_event",
    "to_device",
    "wait_for_event",
    "wait_for_stream",
]

_PLAIN: Final = frozenset[type]({torch.Tensor, torch.nn.Parameter})
"""Subclasses may lie in memory in other ways."""


def is_asynchronous(device: torch.device) -> bool:
    """Return whether operators return before the device has computed their results."""
    return device.type not in ("cpu", "meta")


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the device's current stream in this thread."""
    return torch.accelerator.current_stream(device) if is_asynchronous(device) else None


def new_stream(device: torch.device, *, high_priority: bool = False) -> torch.Stream | None:
    """Return a new stream; at high priority its kernels start before those of others."""
    return torch.Stream(device, priority=-1 if high_priority else 0) if is_asynchronous(device) else None


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one in this thread; None: keep the present one.

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
    """Return an event after everything that is queued on the current stream now."""
    if not is_asynchronous(device):
        return None
    event = torch.Event(device, enable_timing=keeps_time)
    event.record(torch.accelerator.current_stream(device))
    return event


def order_after(event: torch.Event | None, stream: torch.Stream | None) -> None:
    """Make a stream wait for an event before what is queued on it from now on; the host does not wait."""
    if stream is not None and event is not None:
        stream.wait_event(event)


def wait_for_stream(device: torch.device) -> None:
    """Block the host until everything on the current stream has run."""
    # Never synchronize the whole device: two ranks that send to each other would both wait for the other to receive.
    if (stream := current_stream(device)) is not None:
        stream.synchronize()


def has_happened(event: torch.Event | None) -> bool:
    """Return, without waiting, whether the device has reached an event."""
    return event is None or event.query()


def wait_for_event(event: torch.Event | None) -> None:
    """Block the host until the device has reached an event, whatever has been queued since."""
    if event is not None:
        event.synchronize()


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised bytes on the host, pinned if `device` is asynchronous."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_asynchronous(device))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what `tensor.to(device)` does, without blocking the host; the caller may write to `tensor` at once.

    See [Note: copies that do not block the host].
    """
    is_plain = tensor.layout is torch.strided and type(tensor) in _PLAIN
    if tensor.device.type != "cpu" or not is_asynchronous(device) or not is_plain:
        return tensor.to(device)
    return torch.empty_like(tensor, requires_grad=False, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that operators of a device draw from; its state can be read without a wait."""
    if not is_asynchronous(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()  # makes the generators
    number = torch.empty(0, device=device).get_device()  # resolves a device without an index
    generator: torch.Generator = module.default_generators[number]
    return generator


def current_device() -> torch.device:
    """Return the device that this process computes on: the current one of its accelerator, or the CPU without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators of the CPU and of a device after the block."""
    if is_asynchronous(device):
        with torch.random.fork_rng([device], device_type=device.type):
            yield
    else:
        with torch.random.fork_rng([]):
            yield


def make_current(device: torch.device) -> None:
    """Make a device the current one of this thread; a new thread begins with the first device."""
    # Even querying an event of another device can make a context on the current one: half a GiB for each process.
    if is_asynchronous(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)
