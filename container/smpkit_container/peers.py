"""Let every host of a job know how the others end: each keeps a connection to the first host while the job lasts.

Ranks may wait for a lost host without end (NCCL does), and a platform that runs one container per host tells none of
them about the others. So a host whose rank fails says so, one that vanishes is noticed by its broken connection, and
the first host passes both on.

Whoever connects proves that it knows the job's token, and so does the first host: `multiprocessing.connection`'s
challenges, in both directions. Messages are JSON; nothing is unpickled::

    host i                             first host
    [index, facts]                 ->
                                   <-  facts of all hosts                (when all have come)
    {"stop": signal}              <->  (to all, when one is asked to stop)
    {"done": true} or
    {"failed": [host, reason, lost]}  ->
                                   <-  {"failed": [host, reason, lost]}
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from smpkit.errors import LaunchError, SmpkitError
from smpkit_container.topology import Topology

_MESSAGE_SECONDS = 10.0
"""For the rest of a message to come once it has begun, and for every step of the meeting."""
_SEND_SECONDS = 0.5
_RETRY_SECONDS = 0.5
_MAX_BYTES = 1 << 23
_MAX_VISITORS = 256
_MAX_REASON_CHARACTERS = 600
_NO_HOST = (OSError, EOFError, ValueError, RecursionError, AssertionError, AuthenticationError)
"""What the standard library raises where the other side is no host of this job."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that loses power says nothing: after 30 silent seconds it counts as lost."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_STRANGER = "does not know this job's token"
_START_HINT = "look at the log of that host; SMPKIT_START_SECONDS sets how long to wait"

Facts = Mapping[str, Any]
"""What launching needs to know of a host, such as its name and its public key; nothing secret."""


@dataclass(frozen=True)
class News:
    """That another host failed or was lost."""

    host: str
    reason: str
    lost: bool = False
    """Whether its machine or network is gone, so that starting the host again may help. A killed launcher is a failure
    of its host: a scheduler must not restart it."""
    seconds: float = field(default_factory=time.time, compare=False)
    """When it came, since the epoch."""

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}"


class Peers:
    """What this host hears from the others, and tells them.

    Args:
        facts: those of all hosts, in their order.
        connections: by index; on the first host to each of the others, on those to the first.
    """

    def __init__(self, index: int, facts: Sequence[Facts], connections: Mapping[int, Connection]) -> None:
        self.is_first = index == 0
        self.facts = facts
        self.hosts = tuple(str(host["name"]) for host in facts)
        self.connections = dict(connections)
        """To the hosts that have not ended yet, as far as this host knows."""
        self.news: News | None = None
        """The first bad news that came."""
        self.stop_signal = 0
        """The signal that asked the job to stop; 0 if none did."""
        self._host = self.hosts[index]

    @property
    def own_address(self) -> str:
        """The address of this host on the network between the hosts."""
        with socket.socket(fileno=socket.dup(next(iter(self.connections.values())).fileno())) as twin:
            return str(twin.getsockname()[0])

    def hear(self, index: int) -> bool:
        """Take in one message of a host; return False when no more will come."""
        news, over = None, True
        try:
            match json.loads(self.connections[index].recv_bytes(_MAX_BYTES)):
                case {"stop": int(number)} if number in _STOPS:
                    self.stop(number, source=index)
                    return True
                case {"failed": [str(host), str(reason), bool(lost)]}:
                    # The first host stays until all have told how they ended.
                    news, over = News(host, reason, lost), self.is_first
                case {"done": True}:
                    pass
                case message:
                    raise ValueError(message)
        except (EOFError, ConnectionError):
            news = News(self.hosts[index], "the host was lost: its launcher was killed")
        except OSError as error:  # without a number: what came is no message
            reason = "the host was lost: it fell silent" if error.errno else "gave up on the host: it sent garbage"
            news = News(self.hosts[index], reason, lost=bool(error.errno))
        except (ValueError, RecursionError):
            news = News(self.hosts[index], "gave up on the host: it sent garbage")
        if over:
            del self.connections[index]
        if news is not None and self.news is None:
            self.news = news
            if self.is_first:
                self._tell({"failed": [news.host, news.reason[:_MAX_REASON_CHARACTERS], news.lost]})
        return False

    def stop(self, number: int, source: int = -1) -> None:
        """Stop the job on every host when one of them is asked to: ranks that save wait for each other."""
        if not self.stop_signal:
            self.stop_signal = number
            self._tell({"stop": number}, source)

    def conclude(self, reason: str | None) -> None:
        """Tell the others how this host's part ended: `reason` if it failed of its own accord."""
        failed = [self._host, (reason or "")[:_MAX_REASON_CHARACTERS], False]
        self._tell({"done": True} if reason is None else {"failed": failed})

    def _tell(self, message: Mapping[str, Any], source: int = -1) -> None:
        for index, connection in self.connections.items():
            if index != source:
                with contextlib.suppress(OSError):  # one that is gone shows when it is heard
                    connection.send_bytes(json.dumps(message).encode())


@contextlib.contextmanager
def meet(topology: Topology, facts: Facts, seconds: float, port: int, token: bytes) -> Iterator[Peers]:
    """Wait until all hosts of the job have come, for `seconds` at most; exchange `facts`, and stay connected.

    The first host listens at `port`. Whoever does not know the `token` is no host of the job. An error that ends the
    block is told to the other hosts.
    """
    facts = {**facts, "name": topology.host, "ranks": topology.processes_per_host}
    find = _receive if topology.node_rank == 0 else _join
    everybody, connections = find(topology, facts, seconds, port, token)
    peers = Peers(topology.node_rank, everybody, connections)
    try:
        _check_ranks(everybody)
        yield peers
    except SmpkitError as error:
        peers.conclude(str(error))
        raise
    finally:
        for connection in connections.values():
            connection.close()


def _check_ranks(everybody: Sequence[Facts]) -> None:
    """Refuse hosts that count their ranks differently, as where a GPU has failed: ranks would wait for each other."""
    first, *others = everybody
    different = [f"{host['name']} {host['ranks']}" for host in others if host["ranks"] != first["ranks"]]
    if different:
        what = f"{first['name']} would start {first['ranks']} ranks, but {', '.join(different[:5])}"
        hint = "all hosts need as many GPUs; `processes_per_host` sets how many ranks each of them starts"
        raise LaunchError(what, hint=hint)


def _receive(
    topology: Topology, facts: Facts, seconds: float, port: int, token: bytes
) -> tuple[list[Facts], dict[int, Connection]]:
    """On the first host: let the others in, each in a thread, so that strangers hold nobody up."""
    guests: dict[int, tuple[Connection, Facts]] = {}
    strangers: list[str] = []

    def welcome(visitor: socket.socket, address: str) -> None:
        connection = _connection(visitor)
        try:
            deliver_challenge(connection, token)
            answer_challenge(connection, token)
            match json.loads(connection.recv_bytes(_MAX_BYTES)):
                case [int(index), {"name": str()} as theirs] if 0 < index < len(topology.hosts):
                    guests[index] = (connection, theirs)
                case message:
                    raise ValueError(message)
        except _NO_HOST:
            strangers.append(address)
            connection.close()

    deadline = time.monotonic() + seconds
    # Hosts may have addresses of IPv6 only, as the pods of such a cluster of Kubernetes.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, backlog=len(topology.hosts), dualstack_ipv6=both) as listener:
        listener.settimeout(_RETRY_SECONDS)
        while missing := _missing(topology.hosts, guests):
            if time.monotonic() >= deadline:
                for connection, _ in guests.values():
                    connection.close()
                came = "".join(f"; somebody at {address} {_STRANGER}" for address in sorted(set(strangers))[:5])
                what = f"{topology.host} waited {seconds:g} s for {', '.join(missing)} to come{came}"
                raise LaunchError(what, hint=_START_HINT)
            with contextlib.suppress(TimeoutError):
                visitor, address = listener.accept()
                if threading.active_count() > _MAX_VISITORS:
                    visitor.close()
                else:
                    threading.Thread(
                        target=welcome, args=(visitor, address[0].removeprefix("::ffff:")), daemon=True
                    ).start()
    connections = {index: guests[index][0] for index in range(1, len(topology.hosts))}
    everybody = [facts, *(guests[index][1] for index in connections)]
    for connection in connections.values():
        with contextlib.suppress(OSError):  # one that is gone shows when it is heard
            connection.send_bytes(json.dumps(everybody).encode())
    return everybody, connections


def _missing(hosts: Sequence[str], guests: Mapping[int, tuple[Connection, Facts]]) -> list[str]:
    """Return the hosts that have not come, or else those that are gone again: who waits has nothing to say."""
    missing = [host for index, host in enumerate(hosts) if index and index not in guests]
    return missing or [hosts[index] for index, (connection, _) in guests.items() if connection.poll()]


def _join(
    topology: Topology, facts: Facts, seconds: float, port: int, token: bytes
) -> tuple[list[Facts], dict[int, Connection]]:
    """On every other host: find the first; its name may not resolve and its port not be open yet."""
    address = topology.address or topology.hosts[0]
    deadline = time.monotonic() + seconds
    why: object = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = _connection(socket.create_connection((address, port), timeout=min(_MESSAGE_SECONDS, left)))
        except OSError as error:
            why = error
            time.sleep(_RETRY_SECONDS)
            continue
        try:
            answer_challenge(connection, token)
            deliver_challenge(connection, token)
            connection.send_bytes(json.dumps([topology.node_rank, facts]).encode())
            if not connection.poll(max(_RETRY_SECONDS, deadline - time.monotonic())):  # until all hosts have come
                raise TimeoutError
            everybody: list[Facts] = json.loads(connection.recv_bytes(_MAX_BYTES))
            return everybody, {0: connection}
        except _NO_HOST:
            why = f"it closed the connection, or {_STRANGER}"
            connection.close()
            time.sleep(_RETRY_SECONDS)
    first = topology.hosts[0]
    raise LaunchError(f"{topology.host} waited {seconds:g} s for {first}, the first host: {why}", hint=_START_HINT)


def _connection(plain: socket.socket) -> Connection:
    plain.settimeout(None)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    for option, seconds in ((socket.SO_RCVTIMEO, _MESSAGE_SECONDS), (socket.SO_SNDTIMEO, _SEND_SECONDS)):
        plain.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
    return Connection(plain.detach())
