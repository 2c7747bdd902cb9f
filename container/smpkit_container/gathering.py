"""Bring the hosts of a job together before their ranks are started, and let none of them wait for one that is gone."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from smpkit.errors import LaunchError, SmpkitError
from smpkit_container.host import meeting_place
from smpkit_container.peers import Peers, meet
from smpkit_container.ssh import client_environment, make_key, server_command
from smpkit_container.topology import DEFAULT_PORT, Topology

__all__ = ["Gathered", "gather", "interface_with"]

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_PLACE = re.compile(r"/tmp/smpkit-[A-Za-z0-9_]{1,32}")  # noqa: S108 - only a form to be matched
_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]{1,200}")


@dataclass(frozen=True)
class Gathered:
    """What a host knows and does beyond what it would do alone."""

    peers: Peers | None = None
    place: Path | None = None
    """Where the launcher of every host listens for its ranks: mpirun gives all of them the same environment."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables for mpirun."""
    server: tuple[str, ...] = ()
    """What a host runs whose ranks are started by the first host's mpirun."""
    topology: Topology | None = None
    """The topology with what only the meeting told: the network interface between the hosts."""


@contextlib.contextmanager
def gather(topology: Topology, seconds: float, token: bytes = b"") -> Iterator[Gathered]:
    """Wait for the other hosts, at most `seconds`; with mpirun, also make it possible to start ranks on them.

    An error that ends the block is reported to the other hosts.

    Args:
        token: the job's, which all of its hosts know.

    Raises:
        LaunchError: a host did not come in time, or this one was asked to stop meanwhile.
    """
    if topology.single_host:
        yield Gathered()
        return
    port = topology.port or DEFAULT_PORT
    folder = Path(tempfile.mkdtemp(prefix="smpkit-ssh-"))
    try:
        uses_mpi = topology.launcher == "mpirun"
        place = meeting_place() if uses_mpi and topology.node_rank == 0 else None
        key = make_key(folder, "key") if uses_mpi else ""
        facts = {"key": key, "place": str(place or "")}
        with contextlib.ExitStack() as stack:
            with _stoppable():
                peers = stack.enter_context(meet(topology, facts, seconds, port + 1, token))
            with _failures_told(peers):
                known = _as_met(topology, peers)
                yield replace(
                    _arranged(known or topology, peers, folder, place, port + 2) if uses_mpi else Gathered(peers),
                    topology=known,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_met(topology: Topology, peers: Peers) -> Topology | None:
    """Return the topology with the network interface over which the hosts met; None if it is known."""
    if topology.interface:
        return None
    return replace(topology, interface=interface_with(peers.connections[0].getsockname()[0]))


def interface_with(address: str) -> str:
    """Return the network interface that has an address (IPv4, on Linux); empty if none is found."""
    if sys.platform != "linux" or ":" in address.removeprefix("::ffff:"):
        return ""
    wanted = socket.inet_aton(address.removeprefix("::ffff:"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address of this kind
                answer = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if answer[20:24] == wanted:
                    return name
    return ""


def _arranged(topology: Topology, peers: Peers, folder: Path, place: Path | None, port: int) -> Gathered:
    """Make ready what mpirun needs: on the first host the client's side of ssh, on the others the server's."""
    keys = {host: _matching(_KEY, facts.get("key"), host) for host, facts in peers.facts.items()}
    if place is not None:
        return Gathered(peers, place, client_environment(folder, "key", keys, port))
    first = topology.hosts[0]
    place = Path(_matching(_PLACE, peers.facts[first].get("place"), first))
    place.mkdir(mode=0o700)
    return Gathered(peers, place, server=tuple(server_command(folder, "key", keys[first], port)))


def _matching(pattern: re.Pattern[str], value: object, host: str) -> str:
    """Return a text that another host sent and that goes into a file here."""
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise LaunchError(f"{host} sent `{str(value)[:80]}`, which is not what was asked for")
    return value


@contextlib.contextmanager
def _failures_told(peers: Peers) -> Iterator[None]:
    try:
        yield
    except SmpkitError as error:
        peers.conclude(str(error))
        raise


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM end the wait: the first process of a container ignores it without a handler."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise LaunchError(f"stopped by {signal.Signals(number).name} while waiting for the other hosts")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
