"""Wake a rank that waits inside a call of CUDA when another one fails.

A host in `.item()` or `synchronize()` waits for its GPU. If a kernel there waits for a rank that is gone, nothing ends
it: the driver knows of no ranks, and between GPUs of one machine nccl does not notice either before its own deadline,
after which torch kills the process without a word about who waited for whom. So where nccl connects ranks, each of
them has one thread that looks, about once a second, at what could be the end::

    the board                    another rank, or a thread of this one, has said that it fails
    the processes beside it      a rank of this machine died without a word (killed, or out of memory)
    nccl's own errors            another machine hung up, or an operation passed its deadline

It tells the others, and ends the kernels of this rank. The call returns, and the next word with another rank, or the
error that torch raises, becomes the verdict (`deadline.waiting`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch.distributed as dist

from smpkit.errors import RemoteError, SmpkitError
from smpkit.torch import deadline
from smpkit.torch.board import Board, Note

__all__ = ["end", "place_of_process", "watch"]

_LOOK_SECONDS: Final = 1.0
_PARTING_SECONDS: Final = 5.0  # for the thread to come out of what it is in
_PROCESSES = Path("/proc")

_watcher: _Watcher | None = None


def place_of_process() -> str | None:
    """Return what is the same for processes that see each other under the same numbers; None if Linux does not say."""
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{(_PROCESSES / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def watch(board: Board, processes: Mapping[int, int]) -> None:
    """Watch until `end`, if nccl connects the ranks; otherwise every wait of a host has a deadline.

    Args:
        processes: of the other ranks on this machine.
    """
    global _watcher  # noqa: PLW0603 - one per process, like the default process group
    if board.size > 1 and any(deadline.device_backends(group) for group in board.groups()):
        _watcher = _Watcher(board, processes)


def end() -> None:
    """Stop watching. Never raises."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.end()


class _Watcher:
    """The thread, and what it does.

    Args:
        board: where ranks say why they fail.
        processes: of the other ranks on this machine.
    """

    def __init__(self, board: Board, processes: Mapping[int, int]) -> None:
        self._board: Board | None = board
        self._processes = dict(processes)
        self._reads_board = True
        self._server_ended = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smpkit-watcher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Look until something fails, or nobody needs it any more."""
        while not self._over.wait(_LOOK_SECONDS):
            board = self._board
            if board is None or self._look(board):
                return

    def end(self) -> None:
        """Stop, and let the other ranks know that this one's process may end now."""
        board, self._board = self._board, None
        self._over.set()
        # A process that ends while another thread is inside C++ may be aborted for it.
        self._thread.join(_PARTING_SECONDS)
        if board is None or deadline.failed():
            return
        with contextlib.suppress(dist.DistError, RuntimeError):
            if not board.notes([board.rank]):
                board.say(Note(board.rank, "ended", "it called smp.shutdown()"))

    def _look(self, board: Board) -> bool:
        """Look once; return whether the job has failed."""
        found = self._failure(board) or self._death(board) or self._error(board)
        if found is None or self._over.is_set():
            return False
        deadline.give_up(found)
        return True

    def _failure(self, board: Board) -> SmpkitError | None:
        """Return what the board says."""
        if not self._reads_board:
            return None
        try:
            first, server = board.glance()
        except (dist.DistError, RuntimeError) as gone:
            self._reads_board = False
            # A launcher that serves the store may end before its ranks, and so may rank 0 when it is done.
            if self._server_ended or board.server != "rank 0":
                return None
            why = (str(gone).splitlines() or [type(gone).__name__])[0]
            text = f"rank {board.rank} lost rank 0, which served the store: {why}"
            return RemoteError(text, hint="see the output of rank 0")
        self._server_ended = server is not None and server.kind == "ended"
        return None if first is None else deadline.verdict_of(first)

    def _death(self, board: Board) -> SmpkitError | None:
        """Return an error if the process of another rank has ended before its script did."""
        for rank in [rank for rank, pid in self._processes.items() if not _lives(pid)]:
            del self._processes[rank]
            try:
                note = board.notes([rank]).get(rank)
                if note is not None and note.kind == "ended":
                    continue
                text = f"rank {board.rank} lost rank {rank}, whose process ended without a word"
                first = board.fail(Note(board.rank, "failed", text))
            except (dist.DistError, RuntimeError):
                continue  # the store is gone: `_failure` knows what that means
            return deadline.verdict_of(first)
        return None

    def _error(self, board: Board) -> SmpkitError | None:
        """Return an error if an operation between GPUs has failed, or passed its deadline."""
        for group in board.groups():
            for backend in deadline.device_backends(group):
                error = backend.get_error().name
                if error == "SUCCESS":
                    continue
                peers = [rank for rank in dist.get_process_group_ranks(group) if rank != board.rank]
                what = f"an operation between GPUs ({group.group_desc})"
                is_late = error == "TIMEOUT"
                seconds = board.timeout.total_seconds() if is_late else 0.0
                return deadline.diagnose(what, peers, "timeout" if is_late else f"nccl: {error}", seconds)
        return None


def _lives(pid: int) -> bool:
    """Return whether a process of this machine runs; one that ended may still be listed, for its parent to ask why."""
    try:
        text = (_PROCESSES / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    except OSError:  # it is there, and not for us to read
        return True
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")
