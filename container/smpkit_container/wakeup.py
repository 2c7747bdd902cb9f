"""Signals as events of a selector, for a loop that waits for several things at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from types import FrameType

__all__ = ["STOP_SIGNALS", "Wakeup", "reap_orphans", "wakeup"]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Wakeup:
    """Tells which signals came since the last look."""

    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return self._reader.recv(4096)
        return b""


@contextlib.contextmanager
def wakeup() -> Iterator[Wakeup]:
    """Turn the signals that matter into bytes on a socket; afterwards they do again what they did before."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def note(number: int, frame: FrameType | None) -> None:
        """Do nothing: Python writes the number to the socket, but only if there is a handler."""

    previous_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # What is ignored stays so: SIGHUP under nohup, SIGINT of a background job.
    noted = [n for n in (*STOP_SIGNALS, signal.SIGCHLD) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in noted}
    try:
        yield Wakeup(reader)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_descriptor)
        reader.close()
        writer.close()


def reap_orphans(process: subprocess.Popen[bytes]) -> None:
    """As PID 1 of a container, reap orphaned processes, which would pile up as zombies."""
    if os.getpid() != 1:
        return
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == process.pid:
            return
        os.waitpid(found.si_pid, 0)
