"""Run a function on several real ranks (processes, gloo) and collect what each returned.

Ranks are forked from a server that has imported what they need (`preloaded.py`), so a world of four starts in a tenth
of a second. The store that the ranks meet at lives in the test process (as torchrun's agent store does), so no port is
ever raced for.
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
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which its types hide

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
_LAST_WORDS_SECONDS = 30
"""The other ranks usually fail because of the first that does: they are heard, but not for ever."""


class RankFailed(AssertionError):
    """A rank raised, died or never came back; carries every rank's story."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 120,
    env: dict[str, str] | None = None,
    hosts: int = 1,
) -> list[Any]:
    """Call `function(*args)` on `size` ranks and return their results in rank order.

    `function` and `args` must be picklable, so `function` is a module-level one. The environment of each rank is
    torchrun's (`RANK`, `LOCAL_RANK`, ...), plus `env`; `hosts` makes the local ranks look like several machines.
    Raises RankFailed with the tracebacks of all ranks that failed, and within `timeout` seconds whatever happens.
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
        ours, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_rank_main, args=(theirs, variables, function, args), daemon=True)
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
    """Takes tensors to the host: the test compares there, and shall not need a GPU of its own."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
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
                good, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                ranks[rank][0].join(_LAST_WORDS_SECONDS)
                good, value = False, f"died without a word (exit code {ranks[rank][0].exitcode})"
            (results if good else failures)[rank] = value
        if failures and settle is None:
            settle = time.monotonic() + _LAST_WORDS_SECONDS
    for rank in waiting.values():
        failures[rank] = (
            f"still running after {timeout:.0f} s" if settle is None else "still running when another failed"
        )
    if failures:
        raise RankFailed("\n".join(f"--- rank {rank}: {story}" for rank, story in sorted(failures.items())))
    return [results[rank] for rank in range(len(ranks))]
