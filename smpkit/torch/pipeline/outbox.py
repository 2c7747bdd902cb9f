"""Messages that wait until the device has copied their bytes to the host, which goes on with other work meanwhile.

They go out in the order in which they were given: at the next action that finds their copy over, or at the latest when
this rank is about to wait for another one, which may be waiting for just these. Where the bytes are there already, as
they always are on a CPU, a message goes out at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from smpkit.torch import devices

__all__ = ["Outbox"]


class Outbox:
    """What one rank has still to send.

    Args:
        send: called with `(packed, target, tag)`.
    """

    def __init__(self, send: Callable[[torch.Tensor, int, int], None]) -> None:
        self._send = send
        self._waiting: deque[tuple[torch.Event | None, torch.Tensor, int, int]] = deque()

    def send(self, packed: torch.Tensor, target: int, tag: int, ready: torch.Event | None) -> None:
        """Send a tensor of the host as soon as the device has come to `ready`; None: at once."""
        if ready is None and not self._waiting:
            self._send(packed, target, tag)
        else:
            self._waiting.append((ready, packed, target, tag))

    def poll(self) -> None:
        """Send what is ready, without waiting for anything."""
        while self._waiting and devices.has_happened(self._waiting[0][0]):
            self._send(*self._waiting.popleft()[1:])

    def flush(self) -> None:
        """Wait for the device, and send everything."""
        while self._waiting:
            ready, packed, target, tag = self._waiting.popleft()
            devices.wait_for_event(ready)
            self._send(packed, target, tag)
