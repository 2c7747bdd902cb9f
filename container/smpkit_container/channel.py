"""The words that the launcher of a host and the watchers of its ranks exchange: JSON lines on a Unix socket.

::

    watcher                                  launcher
    hello  rank, local_rank, pid,
           and 4 pipe ends                ->
                                          <- welcome  program, variables of this host
    start  pid                            ->
                                          <- signal   number           (any number of times)
    exit   code or signal, seconds        ->
                                          <- leave                     (when the host is done)

The pipe ends are, in this order: the script's stdout, its stderr, its report, its stacks. The launcher reads them
itself, so no output passes through the watcher. The report is one JSON object, written when the script raises.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ADDRESS_VARIABLE", "NUM_PIPES", "Inbox", "packed"]

ADDRESS_VARIABLE = "SMPKIT_LAUNCHER"
"""Where the launcher of this host listens."""

NUM_PIPES = 4
_MAX_BYTES = 1 << 24


class Inbox:
    """Bytes received so far; gives back whole messages."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add `data` and return the messages that are now complete.

        Raises:
            ValueError, RecursionError: what came is no message.
        """
        *complete, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_BYTES:
            raise ValueError(f"a message of more than {_MAX_BYTES} bytes")
        return [json.loads(line) for line in complete]


def packed(kind: str, **values: Any) -> bytes:
    """Return one message as bytes."""
    return json.dumps({"type": kind, **values}).encode() + b"\n"
