"""One rank as the launcher sees it: the connection to its watcher, the script's four pipes, and what came from them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any

from smpkit.observe.status import RankStatus
from smpkit_container.channel import Inbox, packed
from smpkit_container.lines import LineSplitter
from smpkit_container.root_cause import RankEnd, RankError

__all__ = ["RankLink"]

_KEPT_LINES = 20
_SEND_SECONDS = 5.0


class RankLink:
    """What is known of a rank; the launcher's loop fills it in."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox = Inbox()
        self.number = -1  # until its hello
        self.pipes: list[int] = []
        self.splitters = [LineSplitter(), LineSplitter()]
        self.notes = [bytearray(), bytearray()]  # report, stacks
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.started = False
        self.status: int | None = None
        self.ended_seconds = 0.0
        self.peak_bytes = 0
        self.stopped = False
        self.doing: RankStatus | None = None
        """What it did as it ended, if it uses smpkit."""
        self.watcher = 0
        """The process of the watcher; 0 before its hello."""
        self.process = -1
        """A descriptor that tells the end of the rank's own process; -1 without one."""
        self.silent_at = float("inf")
        """When to give up on the watcher, whose rank has ended."""
        self.is_silent = False
        """Whether the watcher was asked again how its rank ended."""
        self.status_is_lost = False
        """Whether it never said so."""

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def error(self) -> RankError | None:
        report = bytes(self.notes[0])
        return _error(json.loads(report)) if report.endswith(b"\n") else None

    @property
    def failed(self) -> bool:
        return bool(self.status) or bool(self.notes[0])

    @property
    def has_answered(self) -> bool:
        """Whether it has begun to write its stack."""
        return bool(self.notes[1])

    def tell(self, kind: str, **values: Any) -> None:
        """Send one message to the watcher; it may be gone, which its closed connection will tell."""
        self.send(packed(kind, **values))

    def send(self, message: bytes) -> None:
        """Send one packed message; a long one needs more than the socket holds, so it waits for the watcher to read."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(_SEND_SECONDS)
            self.connection.sendall(message)
        with contextlib.suppress(OSError):
            self.connection.setblocking(False)

    def signal_watcher(self, number: int) -> None:
        """Send a signal to the watcher itself; the open connection shows that its number is not another process's."""
        if self.watcher and self.connection.fileno() >= 0:
            with contextlib.suppress(OSError):
                os.kill(self.watcher, number)

    def end(self) -> RankEnd:
        """Return the whole story of the rank."""
        return RankEnd(
            rank=self.number,
            status=self.status,
            seconds=self.ended_seconds,
            error=self.error,
            stopped=self.stopped,
            last_lines=tuple(self.last_lines),
            peak_bytes=self.peak_bytes,
            stack=self.notes[1].decode("utf-8", errors="replace"),
            status_is_lost=self.status_is_lost,
            doing=self.doing,
        )


def _error(report: Mapping[str, Any]) -> RankError:
    return RankError(
        name=report["name"],
        message=report["message"],
        traceback=report["traceback"],
        chain=tuple(report["chain"]),
        frames=tuple((file, line, function) for file, line, function in report["frames"]),
        hint=report["hint"],
        exit_code=report["exit_code"],
        seconds=report["seconds"],
    )
