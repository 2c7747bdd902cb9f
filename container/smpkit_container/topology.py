"""Place the job on its machines: which host this is, who is first, and how many ranks each host runs."""

from __future__ import annotations

import contextlib
import fcntl
import math
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from smpkit.config.wire import MP_PARAMETERS, MPI_ENABLED, PROCESSES_PER_HOST, TORCHRUN_ENABLED
from smpkit.errors import ConfigError, Problem
from smpkit_container.environment import Environment

Launcher = Literal["mpirun", "torchrun", "shell"]
"""What starts the ranks; a shell script is started once on each host, by us."""

DEFAULT_PORT = 7777
"""The port at which the ranks of several hosts meet; the one that AWS's PyTorch images use."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


@dataclass(frozen=True)
class Topology:
    """The hosts in platform order; a host's place in that order is its node rank, and the first host is the master."""

    hosts: tuple[str, ...]
    node_rank: int
    processes_per_host: int
    launcher: Launcher
    port: int | None = None
    """`ddp_port` of the configuration; None = any free port on one host, DEFAULT_PORT on several."""
    interface: str = ""
    address: str = ""
    """Where the first host is reached; default: by its name."""

    @property
    def world_size(self) -> int:
        return len(self.hosts) * self.processes_per_host

    @property
    def single_host(self) -> bool:
        return len(self.hosts) == 1

    @property
    def master(self) -> str:
        """Where the ranks meet: the loopback address on one host, because its name need not resolve."""
        return "127.0.0.1" if self.single_host else self.address or self.hosts[0]

    @property
    def host(self) -> str:
        return self.hosts[self.node_rank]


def read_topology(environment: Environment) -> Topology:
    """Derive the topology; hosts keep the order given (the platform sorts them as text: algo-1, algo-10, algo-2)."""
    resources = environment.resources
    launcher: Launcher = "shell" if environment.script.endswith(".sh") else "torchrun"
    port, ranks = None, 1
    if launcher == "shell":
        _refuse_launchers(environment)
    else:
        if _is_on(environment, MPI_ENABLED):
            launcher = "mpirun"
        ranks = _processes_per_host(environment, launcher)
        port = _whole_number(environment.mp_parameters.get("ddp_port"), (MP_PARAMETERS, "ddp_port"), 0, 65535)
    return Topology(
        hosts=resources.hosts,
        node_rank=resources.hosts.index(resources.current_host),
        processes_per_host=ranks,
        launcher=launcher,
        port=port or resources.port,
        interface=resources.interface,
        address=resources.address,
    )


def _is_on(environment: Environment, name: str) -> bool:
    """Read a switch: SDK v2 sends on whatever the user wrote for `enabled`, such as 1 or `"true"`."""
    value = environment.framework.get(name)
    text = str(value).lower() if isinstance(value, (str, bool, int)) else value
    if text in ("true", "1"):
        return True
    if text in (None, "false", "0", ""):
        return False
    raise ConfigError(
        [Problem(("hyperparameters", name), f"must be true or false, got {value!r}")], subject="job files"
    )


def _refuse_launchers(environment: Environment) -> None:
    """Raise if a launcher is asked for beside a shell script: it starts Python."""
    asked = [name for name in (MPI_ENABLED, TORCHRUN_ENABLED) if _is_on(environment, name)]
    if environment.mp_parameters:
        asked.append(MP_PARAMETERS)
    if asked:
        message = f"is a shell script, which runs once on each host, without the launcher that `{asked[0]}` asks for"
        hint = "name a Python script, or remove `distribution`"
        raise ConfigError([Problem(("entry_point",), message, hint)], subject="job files")


def _processes_per_host(environment: Environment, launcher: Launcher) -> int:
    name = PROCESSES_PER_HOST[launcher]
    asked = _whole_number(environment.framework.get(name), ("hyperparameters", name), 1, 4096)
    return asked or environment.num_gpus or _degree_product(environment.mp_parameters)


def _degree_product(parameters: Mapping[str, Any]) -> int:
    """Return the fewest ranks on which the configuration can run: pipeline degree × tensor degree."""
    degrees = {
        "pipeline_parallel_degree": parameters.get("pipeline_parallel_degree", parameters.get("partitions")),
        "tensor_parallel_degree": parameters.get("tensor_parallel_degree"),
    }
    numbers = (_whole_number(value, (MP_PARAMETERS, name), 1, 4096) for name, value in degrees.items())
    return math.prod(number or 1 for number in numbers)


def _whole_number(value: Any, path: tuple[str, ...], lowest: int, highest: int) -> int | None:
    """Return `value` as an int; strings of digits count, because SDK v2 passes `"8"` on as it was written."""
    if value is None or value == "":
        return None
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is not int or not lowest <= number <= highest:
        message = f"must be a whole number from {lowest} to {highest}, got {value!r}"
        raise ConfigError([Problem(path, message)], subject="job files")
    return number


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
