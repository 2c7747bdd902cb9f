"""Let every host of a job know how the others end: each keeps a connection to the first host while the job lasts.

Ranks on other hosts may wait for a lost one without end (NCCL does), and a platform that runs one container per host
tells none of them about the others. So a host whose rank fails says so, one that vanishes is noticed by its broken
connection, and the first host passes both on. Messages are JSON lines::

    host i                                   first host
    hello  host, facts                    ->
                                          <- welcome  facts            (when all have come)
    stop   number                        <-> (to all, when one is asked to stop)
    done | failed  host, reason           ->
                                          <- done | failed  host, reason

`facts` are what launching needs to know of the other side, such as public keys; nothing secret is sent.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smpkit.errors import LaunchError
from smpkit_container.channel import Inbox, packed
from smpkit_container.topology import Topology

__all__ = ["News", "Peers", "meet"]

_RETRY_SECONDS = 0.5
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_REASON_CHARACTERS = 600
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that loses power says nothing: after 30 silent seconds it counts as lost."""


@dataclass(frozen=True)
class News:
    """That another host failed or was lost."""

    host: str
    reason: str

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}"


class _Peer:
    """One connection; on the first host one per other host, on the others the one to the first."""

    def __init__(self, host: str, connection: socket.socket) -> None:
        self.host = host
        self.connection = connection
        self.inbox = Inbox()
        self.ended = False
        """Whether it has said how its part ended, or is gone."""

    def tell(self, kind: str, **values: Any) -> None:
        with contextlib.suppress(OSError):  # a peer that is gone shows when its connection is read
            self.connection.settimeout(_RETRY_SECONDS)
            self.connection.sendall(packed(kind, **values))
        self.connection.setblocking(False)


class Peers:
    """What this host hears from the others, and tells them."""

    def __init__(self, host: str, first: bool, connections: Mapping[str, socket.socket]) -> None:
        self.is_first = first
        self.facts: dict[str, Mapping[str, Any]] = {}
        """What the others said of themselves, by host."""
        self.news: News | None = None
        """The first bad news that came."""
        self.stop_signal = 0
        """The signal that asked the job to stop; 0 if none did."""
        self._host = host
        self._peers = [_Peer(name, connection) for name, connection in connections.items()]

    @property
    def running(self) -> list[str]:
        """The hosts that have not ended yet, as far as this host knows."""
        return [peer.host for peer in self._peers if not peer.ended]

    @property
    def connections(self) -> list[socket.socket]:
        return [peer.connection for peer in self._peers]

    def hear(self, connection: socket.socket) -> bool:
        """Take in what came over one of `connections`; return False when nothing more will come."""
        peer = next(peer for peer in self._peers if peer.connection is connection)
        data = _received(connection)
        if data is None:
            return True
        for message in peer.inbox.feed(data):
            if message["type"] == "stop":
                self.stop(int(message["number"]), source=peer)
                continue
            peer.ended = True
            if message["type"] == "failed":
                self._note(peer, News(str(message["host"]), str(message["reason"])))
        if not data and not peer.ended:
            peer.ended = True
            self._note(peer, News(peer.host, "the host was lost: its connection broke"))
        return bool(data)

    def conclude(self, reason: str | None) -> None:
        """Tell the others how this host's part ended: `reason` if it failed."""
        for peer in self._peers:
            if reason is None:
                peer.tell("done")
            else:
                peer.tell("failed", host=self._host, reason=reason[:_MAX_REASON_CHARACTERS])

    def stop(self, number: int, source: _Peer | None = None) -> None:
        """Stop the job on every host when one of them is asked to: ranks that save wait for each other."""
        if not self.stop_signal:
            self.stop_signal = number
            for peer in self._peers:
                if peer is not source:
                    peer.tell("stop", number=number)

    def _note(self, source: _Peer, news: News) -> None:
        if self.news is None:
            self.news = news
            for peer in self._peers:
                if self.is_first and peer is not source:
                    peer.tell("failed", host=news.host, reason=news.reason[:_MAX_REASON_CHARACTERS])


@contextlib.contextmanager
def meet(topology: Topology, facts: Mapping[str, Any], seconds: float, port: int) -> Iterator[Peers]:
    """Wait until all hosts of the job have come, exchange `facts`, and stay connected.

    Args:
        port: where the first host listens.

    Raises:
        LaunchError: a host did not come within `seconds`.
    """
    deadline = time.monotonic() + seconds
    if topology.node_rank == 0:
        peers = _gather(topology, facts, deadline, seconds, port)
    else:
        peers = _join(topology, facts, deadline, seconds, port)
    try:
        yield peers
    finally:
        for connection in peers.connections:
            connection.close()


def _gather(topology: Topology, facts: Mapping[str, Any], deadline: float, seconds: float, port: int) -> Peers:
    """On the first host: take in one connection from each of the others."""
    expected = set(topology.hosts[1:])
    found: dict[str, socket.socket] = {}
    said: dict[str, Mapping[str, Any]] = {}
    with socket.create_server(("", port), backlog=len(topology.hosts)) as listener:
        while expected - set(found):
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = ", ".join(host for host in topology.hosts if host in expected - set(found))
                raise LaunchError(
                    f"{topology.host} waited {seconds:g} s for {missing} to come",
                    hint="look at the log of that host; SMPKIT_START_SECONDS sets how long to wait",
                ) from None
            hello = _first_message(connection, min(deadline, time.monotonic() + 10))
            host = str((hello or {}).get("host"))
            if hello is None or host not in expected - set(found):
                connection.close()  # not one of this job
                continue
            found[host], said[host] = _kept_alive(connection), hello["facts"]
    peers = Peers(topology.host, True, {host: found[host] for host in topology.hosts[1:]})
    peers.facts = said
    for connection in peers.connections:
        connection.sendall(packed("welcome", host=topology.host, facts=dict(facts)))
        connection.setblocking(False)
    return peers


def _join(topology: Topology, facts: Mapping[str, Any], deadline: float, seconds: float, port: int) -> Peers:
    """On every other host: find the first; its name may not resolve and its port not be open yet."""
    first = topology.hosts[0]
    why: object = "no answer"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((first, port), timeout=min(10.0, deadline - time.monotonic()))
        except OSError as error:
            why = error
            time.sleep(_RETRY_SECONDS)
            continue
        connection.sendall(packed("hello", host=topology.host, facts=dict(facts)))
        welcome = _first_message(connection, deadline)
        if welcome is not None:
            peers = Peers(topology.host, False, {first: _kept_alive(connection)})
            peers.facts = {first: welcome["facts"]}
            connection.setblocking(False)
            return peers
        connection.close()
        why = "it closed the connection"
        time.sleep(_RETRY_SECONDS)
    raise LaunchError(
        f"{topology.host} waited {seconds:g} s for {first}, the first host: {why}",
        hint="look at the log of that host; SMPKIT_START_SECONDS sets how long to wait",
    )


def _first_message(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Read one message; None if what arrives is not one."""
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        # Without a buffer, so that what comes after this line is left for `Peers.hear`.
        line = connection.makefile("rb", buffering=0).readline(_MAX_MESSAGE_BYTES)
        message = json.loads(line)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("facts"), dict) else None


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _received(connection: socket.socket) -> bytes | None:
    """Read what is there; None if nothing is at the moment, empty at the end."""
    try:
        return connection.recv(65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""
