"""The rendezvous: connect all ranks to one key-value store, from which torch.distributed starts.

The launcher serves a store (torchrun), or rank 0 does at `MASTER_ADDR:MASTER_PORT`. Ranks of one host need neither
variable (`mpirun -np 8 python script.py`): theirs are torch's own defaults, 127.0.0.1 and 29500.

A store has no authentication. So the one of a job on one host listens at the loopback address alone, nothing in any
store is unpickled, and every rank checks that the store it has found is its own job's.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from smpkit.errors import DeadlineError, LaunchError, UsageError
from smpkit.torch.core.context import DEFAULT_PORT, Launch

_LOOPBACK: Final = "127.0.0.1"


def connect_store(launch: Launch, port: int | None, timeout: timedelta) -> Store:
    """Return the store that all ranks of `launch` share, or look for rank 0 until the timeout.

    Args:
        port: `ddp_port`; overrides `MASTER_PORT`, but not the store of a launcher.
    """
    if launch.world_size == 1:
        return HashStore()
    address = _LOOPBACK if launch.single_host and not launch.agent_store else launch.master_address
    if address is None:
        raise UsageError(
            f"the {launch.world_size} ranks of {launch.launcher} run on several hosts, and MASTER_ADDR is not set",
            hint="pass the host of rank 0, for example `mpirun -x MASTER_ADDR=<host> -x MASTER_PORT=29500 ...`",
        )
    if launch.agent_store or not port:
        port = launch.master_port or DEFAULT_PORT
    store = _tcp_store(launch, address, port, serve=launch.rank == 0 and not launch.agent_store, timeout=timeout)
    _check_job(store, launch, timeout)
    return store


def gather(
    store: Store,
    key: str,
    rank: int,
    ranks: Sequence[int],
    value: str,
    timeout: timedelta,
    *,
    what: str = "smp.init()",
    hint: str = "were all ranks started, and does each of them call smp.init()?",
) -> list[str]:
    """Return the `value` of each of some ranks, this one among them, in their order.

    Args:
        key: under which they exchange their values.
        what, hint: the call in which they meet, and why one may not come, for errors.
    """
    keys = {member: f"{key}/{member}" for member in ranks}
    store.set(keys[rank], value)
    try:
        store.wait([*keys.values()], timeout)
    except (dist.DistError, RuntimeError):
        absent = [member for member, name in keys.items() if not _has(store, name)]
        raise DeadlineError(
            f"rank {rank} waited {timeout.total_seconds():g} s in {what} for {name_ranks(absent)}",
            hint=hint,
        ) from None  # the store's message only names keys
    return [data.decode() for data in store.multi_get([*keys.values()])]


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 2`, `ranks 0, 2 and 3`, or of many ranks the first eight and the number of the rest."""
    if not ranks:
        return "the other ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _has(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except (dist.DistError, RuntimeError):
        return False


def local_store(port: int = 0, world_size: int | None = None, timeout: timedelta = timedelta(minutes=5)) -> TCPStore:
    """Serve a store at the loopback address alone; torch's own would listen on every address of the host."""
    with socket.create_server((_LOOPBACK, port), backlog=socket.SOMAXCONN) as listener:
        store = TCPStore(
            _LOOPBACK,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store's from now on
    return store


def _tcp_store(launch: Launch, address: str, port: int, *, serve: bool, timeout: timedelta) -> TCPStore:
    """Serve or find the store at `address:port`."""
    try:
        if serve and address == _LOOPBACK:
            return local_store(port, launch.world_size, timeout)
        # Without `wait_for_workers` the server does not block here: `gather` waits, and can name who is missing.
        return TCPStore(address, port, launch.world_size, serve, timeout, wait_for_workers=False)
    except (dist.DistError, OSError) as error:
        where = f"{address}:{port}"
        if serve:
            raise LaunchError(
                f"rank 0 cannot listen at {where}: {first_line(error)}",
                hint="set MASTER_PORT (or `ddp_port`) to a free port, one for each job, and MASTER_ADDR to the "
                "host of rank 0",
            ) from error
        raise DeadlineError(
            f"rank {launch.rank} waited {timeout.total_seconds():g} s for rank 0 at {where}: {first_line(error)}",
            hint="is MASTER_ADDR the host of rank 0, and can this host reach that port?",
        ) from error


def _check_job(store: Store, launch: Launch, timeout: timedelta) -> None:
    """Check that the store belongs to this job: another one may have been given the same port."""
    # A digest: the store shows its keys and values to whoever reaches it.
    job = hashlib.sha256(f"{launch.job_id}\0{launch.world_size}".encode()).hexdigest()
    try:
        if launch.rank == 0 or launch.agent_store:
            running = store.compare_set("smpkit/job", "", job).decode()
        else:  # only who serves the store may claim it: this may be another job's, which has only just begun to listen
            store.wait(["smpkit/job"], timeout)
            running = store.get("smpkit/job").decode()
    except (dist.DistError, RuntimeError):
        message = f"rank {launch.rank} waited {timeout.total_seconds():g} s in smp.init() for rank 0"
        raise DeadlineError(message, hint="was rank 0 started, and does it call smp.init()?") from None
    if running != job:
        port = store.port if isinstance(store, TCPStore) else ""
        raise LaunchError(
            f"rank {launch.rank} found another job at port {port}",
            hint="two jobs were given one port: set another MASTER_PORT (or `ddp_port`) for one of them",
        )


def first_line(error: BaseException) -> str:
    """Return the first line of a message, or the kind of an error without one."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
