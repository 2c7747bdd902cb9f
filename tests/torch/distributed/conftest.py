"""A port of one's own, and ranks that are whole processes: their deaths and uncaught exceptions are the point."""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which its types hide

from tests.forked import Script

ROOT = Path(__file__).parents[3]
Start = Callable[..., list[Script]]


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """Return a port that nobody else is given: bound and not listening, it is left to the store of rank 0."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield int(reservation.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path, reserved_port: int) -> Iterator[Start]:
    """Return what starts ranks of a script, with a store of ours as torchrun would serve it, or with one in rank 0."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = list[Script]()

    def start_ranks(script: str, size: int, *, agent: bool, reads: bool = False) -> list[Script]:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        common |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_PORT": str(store.port if agent else reserved_port)}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent else {}
        for rank in range(size):
            ranks.append(Script(path, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, reads=reads))
        return ranks

    yield start_ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()
