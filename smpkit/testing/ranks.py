"""Run a function on several real ranks (processes that talk over gloo) and collect what each returned.

Ranks are forked from a server that has imported smpkit's runtime, and what `preload` adds, so a world of four starts in
a tenth of a second. The store that the ranks meet at lives in the calling process (as torchrun's agent store does), so
no port is ever raced for.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which its types hide

__all__ = ["FORKSERVER", "RankFailed", "preload", "run_ranks"]

FORKSERVER: Final = multiprocessing.get_context("forkserver")
"""What starts processes: forks of a server that has imported `smpkit.torch`."""
FORKSERVER.set_forkserver_preload(["smpkit.torch"])

_SECONDS_AFTER_A_FAILURE: Final = 30
"""How long the other ranks may take to report once one has failed: most fail because of the first."""


class RankFailed(AssertionError):
    """A rank raised, died or never returned; the message has the traceback of each rank that failed."""


def preload(*modules: str) -> None:
    """Let the server that forks ranks import these modules once, instead of every rank of every test.

    Call it before the first `run_ranks`. The modules must not start threads or use a GPU: ranks are forks.
    """
    FORKSERVER.set_forkserver_preload(["smpkit.torch", *modules])


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    hosts: int = 1,
) -> list[Any]:
    """Call `function(*args)` on `size` ranks and return their results in rank order.

    Args:
        function: a function of a module, so that it can be pickled; it calls `smp.init()` itself.
        size: the number of ranks.
        args: picklable arguments, the same for every rank.
        timeout: seconds after which ranks that still run are killed.
        env: added to each rank's environment, which is torchrun's (`RANK`, `LOCAL_RANK`, ...).
        hosts: how many machines the ranks believe they are on; must divide `size`.

    Raises:
        RankFailed: a rank raised, died or ran longer than `timeout`; has all tracebacks.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    local_size = size // hosts
    ranks = []
    for rank in range(size):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % local_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        ours, theirs = FORKSERVER.Pipe(duplex=False)
        process = FORKSERVER.Process(target=_rank_main, args=(theirs, variables, function, args), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect(ranks, time.monotonic() + timeout, timeout)
    finally:
        for process, connection in ranks:
            if process.is_alive():
                process.kill()
            process.join()
            connection.close()


class _OnHost(pickle.Pickler):
    """Copies tensors to the host: the test compares there and needs no GPU of its own."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def _rank_main(
    connection: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for name in [name for name in os.environ if name.startswith(("SM_", "SMP_", "SMPKIT_", "OMPI_", "PMI"))]:
        del os.environ[name]
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    # Plain pickle, not `connection.send`: torch teaches that to pass tensors as files of a process that ends now.
    content = io.BytesIO()
    _OnHost(content).dump((True, result))
    connection.send_bytes(content.getvalue())
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(ranks: list[tuple[Any, Connection]], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    settle: float | None = None
    while waiting:
        until = min(deadline, settle) if settle else deadline
        ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                good, value = pickle.loads(connection.recv_bytes())  # noqa: S301 - from a process that we forked
            except EOFError:
                ranks[rank][0].join(_SECONDS_AFTER_A_FAILURE)
                good, value = False, f"died without a traceback (exit code {ranks[rank][0].exitcode})"
            (results if good else failures)[rank] = value
        if failures and settle is None:
            settle = time.monotonic() + _SECONDS_AFTER_A_FAILURE
    for rank in waiting.values():
        failures[rank] = (
            f"still running after {timeout:.0f} s" if settle is None else "still running when another failed"
        )
    if failures:
        raise RankFailed("\n".join(f"--- rank {rank}: {story}" for rank, story in sorted(failures.items())))
    return [results[rank] for rank in range(len(ranks))]
