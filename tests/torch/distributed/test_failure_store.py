"""What is said of a store that is gone."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which its types hide

from smpkit.torch.distributed.failure_store import FailureStore


def test_a_server_that_ended_a_moment_ago_is_named_by_its_address() -> None:
    """Its client knows only that a socket was closed, and says so with a page of C++ frames."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    store = FailureStore(client, 1, 2, timedelta(seconds=5), list, server="rank 0", serves_store=False)
    store.write("key", "text")  # the server was seen just now, so nobody asks whether it is still there
    port = server.port
    del server
    with pytest.raises(dist.DistStoreError, match=f"^nobody listens at 127.0.0.1:{port} any more$"):
        store.read("key")


def test_a_server_that_is_being_killed_is_not_asked() -> None:
    """The kernel accepts connections for it until it is dead, and its client would log a page about the request."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    store = FailureStore(client, 1, 2, timedelta(seconds=5), list, server="rank 0", serves_store=False)
    with socket.create_server(("127.0.0.1", 0)) as dying:
        store._address = dying.getsockname()

        def accept_and_close() -> None:
            dying.accept()[0].close()

        closing = threading.Thread(target=accept_and_close)
        closing.start()
        with pytest.raises(dist.DistStoreError, match=r"^nobody listens at 127\.0\.0\.1:"):
            store.read("key")
        closing.join()
    store._address = ("127.0.0.1", server.port)
    assert store.read("key") is None
