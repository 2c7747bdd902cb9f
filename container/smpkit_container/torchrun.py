"""torchrun for the ranks of one host: `python -m smpkit_container.torchrun ARGUMENTS`, with a store on loopback alone.

torchrun's own `--standalone` opens two stores on every address of the machine, and unpickles what it finds in one of
them: whoever reaches the port runs code as the job. Here the launcher's store listens at 127.0.0.1, and nothing in it
is unpickled, since there is nothing to negotiate between the agents of one host.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as run

__all__ = ["BACKEND", "main"]

BACKEND = "smpkit-loopback"
_LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(seconds=600)


class _Loopback(RendezvousHandler):
    """The rendezvous of an agent that is alone, and so need not meet anybody; it serves the ranks' store."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
        self._port: int = listener.getsockname()[1]
        self._store = TCPStore(
            _LOOPBACK, self._port, 1, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        agents = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(agents, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._port))

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return _Loopback(parameters.run_id)


def main(arguments: Sequence[str]) -> None:
    """Run torchrun, whose `--rdzv-backend` may be `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _handler)
    run(list(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
