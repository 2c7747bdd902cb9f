"""Let every host of a job know how the others end: each keeps a connection to the first host while the job lasts.

Ranks on other hosts may wait for a lost one without end (NCCL does), and a platform that runs one container per host
tells none of them about the others. So a host whose rank fails says so, one that vanishes is noticed by its broken
connection, and the first host passes both on. Messages are JSON lines::

    host i                                   first host
                                          <- challenge  nonce
    hello  host, facts, nonce, proof      ->
                                          <- welcome  facts, proof     (when all have come)
    stop   number                        <-> (to all, when one is asked to stop)
    done | failed  host, reason           ->
                                          <- done | failed  host, reason

`facts` are what launching needs to know of the other side, such as public keys; nothing secret is sent. `proof` is a
digest of the message and the other side's nonce that only hosts of the job can make, since they know its token. Who
cannot, sends garbage or says nothing, is left out, and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smpkit.errors import LaunchError
from smpkit_container.channel import Inbox, packed
from smpkit_container.token import digest
from smpkit_container.topology import Topology

__all__ = ["News", "Peers", "meet"]

_RETRY_SECONDS = 0.5
_HELLO_SECONDS = 10.0
"""For whoever connects to say who it is, and for the first host to ask."""
_MAX_STRANGERS = 256
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_WELCOME_BYTES = 1 << 23
"""It names all hosts, where they did not know each other's names."""
_MAX_REASON_CHARACTERS = 600
_MAX_NAME_CHARACTERS = 255
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A machine that loses power says nothing: after 30 silent seconds it counts as lost."""


_SILENT = "the host was lost: it fell silent"
_KILLED = "the host was lost: its launcher was killed"
"""Whoever stops a host asks its launcher to end first, which it tells the others. So it ran out of memory, or somebody
killed it; a scheduler takes that as its failure, and does not start it again."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


@dataclass(frozen=True)
class News:
    """That another host failed or was lost."""

    host: str
    reason: str

    @property
    def lost(self) -> bool:
        """Whether the machine or its network is gone, so that starting the host again may help."""
        return self.reason.startswith(_SILENT)

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
        self.hosts: tuple[str, ...] = ()
        """The names of all hosts in their order, where they were stand-ins before the meeting."""
        self._host = host
        self._peers = [_Peer(name, connection) for name, connection in connections.items()]

    @property
    def running(self) -> list[str]:
        """The hosts that have not ended yet, as far as this host knows."""
        return [peer.host for peer in self._peers if not peer.ended]

    @property
    def connections(self) -> list[socket.socket]:
        return [peer.connection for peer in self._peers]

    def name_hosts(self, before: Sequence[str], names: Sequence[str]) -> None:
        """Take the names that the hosts gave themselves in place of the stand-ins."""
        new = dict(zip(before, names, strict=True))
        self.hosts = tuple(names)
        self._host = new[self._host]
        for peer in self._peers:
            peer.host = new[peer.host]
        self.facts = {new[host]: facts for host, facts in self.facts.items()}

    def hear(self, connection: socket.socket) -> bool:
        """Take in what came over one of `connections`; return False when nothing more will come."""
        peer = next(peer for peer in self._peers if peer.connection is connection)
        try:
            data = connection.recv(65536)
        except BlockingIOError:
            return True
        except ConnectionError:
            data = b""  # closed by its end, as when the process is killed
        except OSError:  # nobody answered for as long as `_KEEPALIVE` says, or there is no way any more
            self._lose(peer, _SILENT)
            return False
        try:
            for message in peer.inbox.feed(data):
                self._take_in(peer, message)
        except (ValueError, RecursionError):
            peer.ended = True
            self._note(peer, News(peer.host, "the host was given up: it sent what is no message"))
            return False
        if not data:
            self._lose(peer, _KILLED)
        return bool(data)

    def _lose(self, peer: _Peer, reason: str) -> None:
        if not peer.ended:
            peer.ended = True
            self._note(peer, News(peer.host, reason))

    def _take_in(self, peer: _Peer, message: dict[str, Any]) -> None:
        match message:
            case {"type": "stop", "number": int(number)} if number in _STOPS:
                self.stop(number, source=peer)
            case {"type": "failed", "host": str(host), "reason": str(reason)}:
                peer.ended = True
                self._note(peer, News(host, reason))
            case {"type": "done"}:
                peer.ended = True
            case _:
                raise ValueError(message)

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
def meet(topology: Topology, facts: Mapping[str, Any], seconds: float, port: int, token: bytes) -> Iterator[Peers]:
    """Wait until all hosts of the job have come, exchange `facts`, and stay connected.

    Args:
        port: where the first host listens.
        token: the job's; whoever does not know it is no host of the job.

    Raises:
        LaunchError: a host did not come within `seconds`.
    """
    deadline = time.monotonic() + seconds
    if topology.node_rank == 0:
        with contextlib.closing(_Reception(topology, port, token)) as reception:
            peers = reception.wait({**facts, **_own_name(topology)}, deadline, seconds)
    else:
        peers = _join(topology, {**facts, **_own_name(topology)}, deadline, seconds, port, token)
    try:
        yield peers
    finally:
        for connection in peers.connections:
            connection.close()


@dataclass
class _Visitor:
    """Somebody who has connected to the first host."""

    connection: socket.socket
    deadline: float
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    data: bytes = b""


class _Reception:
    """On the first host: takes in one connection from each of the others, and keeps strangers out."""

    def __init__(self, topology: Topology, port: int, token: bytes) -> None:
        self._topology = topology
        self._token = token
        self._guests: dict[str, tuple[socket.socket, dict[str, Any]]] = {}
        self._refused: set[str] = set()
        self._visitors: list[_Visitor] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("", port), backlog=len(topology.hosts))
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Send those away who wait, and listen no more."""
        for visitor in tuple(self._visitors):
            self._dismiss(visitor)
        self._listener.close()
        self._selector.close()

    def wait(self, facts: Mapping[str, Any], deadline: float, seconds: float) -> Peers:
        """Return when all hosts have come; they have been told `facts`."""
        while missing := [host for host in self._topology.hosts[1:] if host not in self._guests]:
            now = time.monotonic()
            if now >= deadline:
                for connection, _ in self._guests.values():
                    connection.close()
                raise self._nobody_came(missing, seconds)
            for visitor in [visitor for visitor in self._visitors if now >= visitor.deadline]:
                self._dismiss(visitor)
            for key, _ in self._selector.select(min(deadline - now, _RETRY_SECONDS)):
                if key.data is None:
                    self._accept()
                elif key.data in self._visitors:
                    self._listen(key.data)
        guests = {host: self._guests[host] for host in self._topology.hosts[1:]}
        if self._topology.name:
            facts = {**facts, "names": _unique([facts, *(hello["facts"] for _, hello in guests.values())])}
        peers = Peers(self._topology.host, True, {host: connection for host, (connection, _) in guests.items()})
        peers.facts = {host: hello["facts"] for host, (_, hello) in guests.items()}
        for connection, hello in guests.values():
            proof = digest(self._token, "welcome", hello["nonce"], facts)
            with contextlib.suppress(OSError):  # one that is gone shows when its connection is read
                connection.settimeout(_HELLO_SECONDS)
                connection.sendall(packed("welcome", facts=dict(facts), proof=proof))
            connection.setblocking(False)
        if self._topology.name:
            peers.name_hosts(self._topology.hosts, facts["names"])
        return peers

    def _nobody_came(self, missing: list[str], seconds: float) -> LaunchError:
        refused = "".join(f"; {host} came and does not know this job's token" for host in sorted(self._refused))
        who = self._topology.name or self._topology.host
        return LaunchError(
            f"{who} waited {seconds:g} s for {', '.join(missing)} to come{refused}",
            hint="look at the log of that host; SMPKIT_START_SECONDS sets how long to wait",
        )

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            visitor = _Visitor(connection, time.monotonic() + _HELLO_SECONDS)
            connection.send(packed("challenge", nonce=visitor.nonce))
            self._visitors.append(visitor)
            self._selector.register(connection, selectors.EVENT_READ, visitor)
        if len(self._visitors) > _MAX_STRANGERS:
            self._dismiss(self._visitors[0])

    def _listen(self, visitor: _Visitor) -> None:
        data = _received(visitor.connection)
        if data is None:
            return
        visitor.data += data
        line, end, _ = visitor.data.partition(b"\n")
        if not end:
            if not data or len(visitor.data) > _MAX_MESSAGE_BYTES:
                self._dismiss(visitor)
            return
        hello = _parsed(line)
        match hello:
            case {"host": str(host), "facts": dict(facts), "nonce": str(nonce), "proof": str(proof)}:
                known = hmac.compare_digest(
                    proof.encode(), digest(self._token, visitor.nonce, host, facts, nonce).encode()
                )
            case _:
                host, known = "", False
        if hello is None or not known or host not in self._topology.hosts[1:]:
            self._refused.update({host} & set(self._topology.hosts[1:]))
            self._dismiss(visitor)
            return
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.connection)
        if host in self._guests:  # its connection broke, and it comes again
            self._guests[host][0].close()
        self._guests[host] = (_kept_alive(visitor.connection), hello)

    def _dismiss(self, visitor: _Visitor) -> None:
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.connection)
        visitor.connection.close()


def _join(
    topology: Topology, facts: Mapping[str, Any], deadline: float, seconds: float, port: int, token: bytes
) -> Peers:
    """On every other host: find the first; its name may not resolve and its port not be open yet."""
    first = topology.hosts[0]
    address = topology.address or first
    why: object = "no answer"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, port), timeout=min(10.0, deadline - time.monotonic()))
        except OSError as error:
            why = error
            time.sleep(_RETRY_SECONDS)
            continue
        theirs = _introduced(connection, topology.host, facts, deadline, token)
        if theirs is not None:
            peers = Peers(topology.host, False, {first: _kept_alive(connection)})
            peers.facts = {first: theirs}
            if topology.name:
                peers.name_hosts(topology.hosts, _names_of(theirs, topology))
            connection.setblocking(False)
            return peers
        connection.close()
        why = "it closed the connection, or does not know this job's token"
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    raise LaunchError(
        f"{topology.name or topology.host} waited {seconds:g} s for {first}, the first host: {why}",
        hint="look at the log of that host; SMPKIT_START_SECONDS sets how long to wait",
    )


def _own_name(topology: Topology) -> dict[str, str]:
    return {"name": topology.name} if topology.name else {}


def _unique(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names that hosts gave themselves; one that is another's, too, is told apart by its place."""
    names = [str(each.get("name") or "host")[:_MAX_NAME_CHARACTERS] for each in facts]
    return [name if names.count(name) == 1 else f"{name}-{place}" for place, name in enumerate(names, 1)]


def _names_of(facts: Mapping[str, Any], topology: Topology) -> list[str]:
    names = facts.get("names")
    if not isinstance(names, list) or len({str(name) for name in names}) != len(topology.hosts):
        count = len(topology.hosts)
        raise LaunchError(f"{topology.hosts[0]}, the first host, did not name the {count} hosts of the job")
    return [str(name) for name in names]


def _introduced(
    connection: socket.socket, host: str, facts: Mapping[str, Any], deadline: float, token: bytes
) -> dict[str, Any] | None:
    """Prove to the first host that this is one of the job, and check that it is, too; return its facts."""
    own = secrets.token_hex(16)
    challenge = _next_message(connection, min(deadline, time.monotonic() + _HELLO_SECONDS))
    if challenge is None or not isinstance(challenge.get("nonce"), str):
        return None
    proof = digest(token, challenge["nonce"], host, facts, own)
    try:
        connection.sendall(packed("hello", host=host, facts=dict(facts), nonce=own, proof=proof))
    except OSError:
        return None
    welcome = _next_message(connection, deadline)
    match welcome:
        case {"facts": dict(theirs), "proof": str(proof)}:
            expected = digest(token, "welcome", own, theirs)
            return theirs if hmac.compare_digest(proof.encode(), expected.encode()) else None
    return None


def _next_message(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Read one line, and nothing after it, which is for `Peers.hear`; None if what arrives in time is no message."""
    line = b""
    while len(line) <= _MAX_WELCOME_BYTES and time.monotonic() < deadline:
        try:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            seen = connection.recv(_MAX_MESSAGE_BYTES, socket.MSG_PEEK)
            line += connection.recv(seen.find(b"\n") + 1 or len(seen))
        except OSError:
            return None
        if not seen or line.endswith(b"\n"):
            return _parsed(line)
    return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


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
