"""Deadlines that pass although nobody is in a hurry: a rank's own, and what it is told before it judges.

A short `timeout_seconds` for all ranks would race: on a busy machine any of them may stand still for longer, before it
waits where the test wants it, or before it says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which its types hide

from smpkit.torch.core.runtime import state
from smpkit.torch.distributed import deadline
from smpkit.torch.distributed.failure_store import FailureStore, RankStatus

SECONDS = 60.0
"""How long a test waits for another rank before it fails."""


def facts() -> TCPStore:
    """Return a store in which the ranks of `run_ranks` leave word of facts: `set(fact, "")`, `wait([fact])`."""
    port, patience = int(os.environ["MASTER_PORT"]), timedelta(seconds=SECONDS)
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)


def wait_shortly(seconds: float = 1) -> None:
    """Let this rank wait for nobody longer from now on; the others may come as late as the machine lets them."""
    failures = deadline.current_failures()
    assert failures is not None
    failure_store = failures.store
    failure_store.timeout = timedelta(seconds=seconds)
    for group in failure_store.groups():
        group.set_timeout(failure_store.timeout)
    state.cfg = state.cfg.model_copy(update={"timeout_seconds": seconds})
    if state.model is not None and state.model.pipeline is not None:
        state.model.pipeline._transport.hosts._timeout = failure_store.timeout


def let_judge(judge: int, heard: Sequence[int]) -> None:
    """Let one rank say why a wait failed, when it has heard some others, however late these come; all repeat it.

    Called on all ranks that wait. Left alone, each judges two seconds after it was woken, by the notes that are there.
    """
    hear = deadline._collect_statuses

    def patiently(store: FailureStore, peers: Sequence[int]) -> dict[int, RankStatus]:
        if store.rank == judge:
            wait_for_notes(heard)
        else:
            until(lambda: store.failure() is not None, f"the verdict of rank {judge}")
        return hear(store, peers)

    deadline._collect_statuses = patiently


def wait_for_notes(ranks: Sequence[int]) -> None:
    """Wait until all of some ranks have said what they waited in when it failed."""
    failures = deadline.current_failures()
    assert failures is not None
    failure_store = failures.store
    until(lambda: len(failure_store.statuses(ranks)) == len(ranks), f"notes of the ranks {ranks}")


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds, and fail if it takes too long."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.02)
