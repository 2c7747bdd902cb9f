"""`smp.launch`: run a function on several ranks, processes of this machine, and return what each returned.

Ranks are forked from a server that has imported smpkit's runtime and used no GPU. So a world of four starts in a tenth
of a second, and a notebook that has used its GPU can start ranks, too. The store that the ranks meet at lives in the
calling process (as torchrun's agent store does), so no port is ever raced for.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final, TypeVar

import cloudpickle
import torch
import torch.distributed as dist

from smpkit.errors import JobError, UsageError
from smpkit.torch.distributed.init import end_work
from smpkit.torch.distributed.rendezvous import local_store

_Result = TypeVar("_Result")

FORKSERVER: Final = multiprocessing.get_context("forkserver")
"""What starts processes: forks of a server that has imported `smpkit.torch`."""
FORKSERVER.set_forkserver_preload(["smpkit.torch"])

_SECONDS_AFTER_A_FAILURE: Final = 30
"""How long the other ranks may take to report once one has failed: most fail because of the first."""
_OF_LAUNCHERS: Final = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


class RankFailed(JobError):
    """A rank raised, died or never returned; the message has the traceback of each rank that failed."""


def launch(
    function: Callable[..., _Result],
    *args: Any,
    ranks: int,
    timeout: float = 86_400,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[_Result]:
    """Call `function(*args, **kwargs)` on `ranks` ranks of this machine; return what each returned, in rank order.

    For notebooks and tests; a job file with `smpkit run` is for anything that you start again and again. What the ranks
    print comes here. Ctrl-C, an error here and the end of this process end them.

    ::

        def train(steps):
            smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True})
            ...
            return losses

        losses, *_ = smp.launch(train, 100, ranks=4)

    In a script, call it below `if __name__ == "__main__":`, since ranks import the script. Tensors that are returned
    come as copies in host memory.

    Args:
        function: it calls `smp.init()` itself. One of a notebook is sent as it is, with what it refers to.
        args, kwargs: sent to every rank.
        ranks: how many; each gets a GPU where there are as many.
        timeout: seconds after which ranks that still run are killed. Between ranks, `timeout_seconds` of the
            configuration holds.
        env: added to this process's environment, and torchrun's (`RANK`, `LOCAL_RANK`, ...).

    Raises:
        RankFailed: a rank raised, died or ran longer than `timeout`; it names each of them, with tracebacks.
        UsageError: there are no ranks, or the function or an argument cannot be sent.
    """
    if ranks < 1:
        raise UsageError(f"smp.launch was asked for {ranks!r} ranks", hint="smp.launch(train, ranks=4)")
    try:
        call = cloudpickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, TypeError) as error:
        hint = "pass what it takes to make such a thing, and make it on the rank"
        raise UsageError(f"smp.launch cannot send its function or arguments to ranks: {error}", hint=hint) from None
    threads = max(1, (os.cpu_count() or 1) // ranks)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    environ = {"OMP_NUM_THREADS": str(threads), **kept, **(env or {})}
    return run_processes(_called, call, size=ranks, environ=environ, timeout=timeout, num_threads=threads)


def _called(call: bytes) -> Any:
    function, args, kwargs = pickle.loads(call)  # noqa: S301 - what `launch` has packed
    return function(*args, **kwargs)


def run_processes(
    function: Callable[..., Any],
    *args: Any,
    size: int,
    environ: Mapping[str, str],
    timeout: float,
    hosts: int = 1,
    dropped: tuple[str, ...] | None = None,
    num_threads: int = 1,
    error: type[RankFailed] = RankFailed,
) -> list[Any]:
    """Call a function in `size` processes, each a rank; kill those that are left at the end.

    Args:
        environ: of each rank, beside torchrun's variables.
        hosts: how many machines the ranks believe they are on; must divide `size`.
        dropped: beginnings of the variables that ranks do not take from the server that they are forked from. None:
            they take none, so `environ` is all there is; and such ranks may start processes of their own.
        error: what is raised for ranks that fail.
    """
    store = local_store()
    ranks: list[tuple[Any, Connection]] = []
    try:
        for rank in range(size):
            place = _place(rank, size, size // hosts, store.port)
            own = {**environ, **place} if dropped is None else {**place, **environ}
            ours, theirs = FORKSERVER.Pipe(duplex=False)
            # Processes of a daemon cannot start any, as those of a DataLoader.
            orders = (theirs, own, dropped, num_threads, function, args)
            process = FORKSERVER.Process(target=_rank_main, args=orders, daemon=dropped is not None)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        results, failures = _collect(ranks, timeout)
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()
    if failures:
        raise error("\n".join(f"--- rank {rank}: {story}" for rank, story in sorted(failures.items())))
    return [results[rank] for rank in range(size)]


def _place(rank: int, size: int, local_size: int, port: int) -> dict[str, str]:
    """Return torchrun's variables."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _collect(ranks: Sequence[tuple[Any, Connection]], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait for the ranks; return what those that succeeded returned, and of the others what happened."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    deadline, late = time.monotonic() + timeout, f"still running after {timeout:.0f} s"
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            has_returned, report = _report_of(ranks[rank][0], connection)
            (results if has_returned else failures)[rank] = report
        settled = time.monotonic() + _SECONDS_AFTER_A_FAILURE
        if failures and settled < deadline:
            deadline, late = settled, "still running when another failed"
    return results, {**failures, **dict.fromkeys(waiting.values(), late)}


def _report_of(process: Any, connection: Connection) -> tuple[bool, Any]:
    try:
        report: tuple[bool, Any] = pickle.loads(connection.recv_bytes())  # noqa: S301 - from a process of ours
    except EOFError:
        process.join(_SECONDS_AFTER_A_FAILURE)
        return False, f"died without a traceback (exit code {process.exitcode})"
    return report


class _OnHost(pickle.Pickler):
    """Copies tensors to the host: the caller compares there and needs no GPU of its own."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def _rank_main(
    connection: Connection,
    environ: Mapping[str, str],
    dropped: tuple[str, ...] | None,
    num_threads: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    if dropped is None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in list(os.environ):
        if dropped is None or name.startswith(dropped):
            del os.environ[name]
    os.environ.update(environ)
    torch.set_num_threads(num_threads)
    try:
        result = function(*args)
        if (error := end_work()) is not None:  # what a script does at exit, which is not run here
            raise error
        # Plain pickle, not `connection.send`: torch teaches that to pass tensors as files of a process that ends now.
        content = io.BytesIO()
        _OnHost(content).dump((True, result))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    connection.send_bytes(content.getvalue())
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this rank when the process that started it is gone: nobody waits for it any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            parent.join()
        os._exit(1)
