"""Deadlines that pass although nobody is in a hurry: a rank's own, and what it is told before it judges.

A short `timeout_seconds` for all ranks would race: on a busy machine any of them may stand still for longer, before it
waits where the test wants it, or before it says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which its types hide

from smpkit.torch import deadline
from smpkit.torch.board import Board, Note
from smpkit.torch.state import state

__all__ = ["SECONDS", "facts", "let_judge", "wait_for_notes", "wait_shortly"]

SECONDS = 60.0
"""After which a test fails that would else hang."""


def facts() -> TCPStore:
    """Return a store in which the ranks of `run_ranks` leave word of facts: `set(fact, "")`, `wait([fact])`."""
    port, patience = int(os.environ["MASTER_PORT"]), timedelta(seconds=SECONDS)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)


def wait_shortly(seconds: float = 1) -> None:
    """Let this rank wait for nobody longer from now on; the others may come as late as the machine lets them."""
    board, runtime = deadline.board(), state.runtime
    assert board is not None
    assert runtime is not None
    board.timeout = timedelta(seconds=seconds)
    for group in board.groups():
        group.set_timeout(board.timeout)
    state.runtime = replace(runtime, cfg=runtime.cfg.model_copy(update={"timeout_seconds": seconds}))
    if state.model is not None and state.model.pipeline is not None:
        state.model.pipeline._transport._timeout = board.timeout


def let_judge(judge: int, heard: Sequence[int]) -> None:
    """Let one rank say why a wait failed, when it has heard some others, however late these come; all repeat it.

    Called on all ranks that wait. Left alone, each judges two seconds after it was woken, by the notes that are there.
    """
    hear = deadline._hear

    def patiently(board: Board, peers: Sequence[int]) -> dict[int, Note]:
        if board.rank == judge:
            wait_for_notes(heard)
        else:
            _until(lambda: board.failure() is not None, f"the verdict of rank {judge}")
        return hear(board, peers)

    deadline._hear = patiently


def wait_for_notes(ranks: Sequence[int]) -> None:
    """Wait until all of some ranks have said what they waited in when it failed."""
    board = deadline.board()
    assert board is not None
    _until(lambda: len(board.notes(ranks)) == len(ranks), f"notes of the ranks {ranks}")


def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.02)
