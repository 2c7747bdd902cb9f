"""One node of a Slurm job: `python -m smpkit_container slurm RUN [-- script arguments...]`, started by srun on each.

`RUN` is the folder of the run, made by `smpkit submit`, which every node sees. From its `spec.json` and the variables
of the step this makes what the platform describes below `/opt/ml` for the launcher, in `RUN/nodes/<node>`. Slurm starts
the next attempt of a job that was preempted in the same folder.

Nodes need no names of each other: the script of the batch job tells the address of the first one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from smpkit.errors import LaunchError
from smpkit_container.described import STOPPED, Host, make_tree, read_spec, variables_of

__all__ = ["STOPPED", "attempt_of", "lay_out", "node_name", "note_end", "open_log", "port_of"]

_FIRST_PORT, _NUM_PORTS = 12_000, 20_000  # below those that systems give to outgoing connections


def node_name(environ: Mapping[str, str]) -> str:
    """Return the name that Slurm has for this node.

    Raises:
        LaunchError: this is no step of a Slurm job.
    """
    name = environ.get("SLURMD_NODENAME")
    if not name or "SLURM_NODEID" not in environ:
        raise LaunchError(
            "SLURMD_NODENAME or SLURM_NODEID is not set", hint="start this with `srun`, once on each node"
        )
    return name


def attempt_of(environ: Mapping[str, str]) -> int:
    """Return how often the job was started before."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def port_of(environ: Mapping[str, str]) -> int:
    """Return the port at which the ranks meet; the launchers meet at the next.

    It is made of the numbers of job and step, so jobs that share a node do not meet at one port.
    """
    job, step = (int(environ.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + 2 * ((job + 97 * step) % (_NUM_PORTS // 2))


def lay_out(run: Path, environ: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """Make the folder of this node; return it, and the variables that the job's file has for the ranks.

    Raises:
        ConfigError: `spec.json` cannot be used.
        LaunchError: this is no step of a Slurm job.
    """
    spec = read_spec(run / "spec.json")
    name = node_name(environ)
    base = run / "nodes" / name
    host = Host(
        name=name,
        index=int(environ["SLURM_NODEID"]),
        count=int(environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_NNODES"]),
        first_address=environ.get("SMPKIT_FIRST_HOST"),  # the batch script asks Slurm for it
        port=port_of(environ),
    )
    make_tree(base, spec, host)
    return base, variables_of(spec, run / "secrets.json")


def open_log(run: Path, environ: Mapping[str, str]) -> str:
    """Send what this process and its children print to the node's log of this attempt, unless srun shows it.

    Returns:
        `1` if lines are to have their times, as in a log.
    """
    if environ.get("SMPKIT_SHOW_LOG") == "1":
        return "0"
    path = run / "logs" / f"{attempt_of(environ)}-{node_name(environ)}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    return "1"


def note_end(run: Path, environ: Mapping[str, str], code: int) -> None:
    """Leave how this node's part ended, for clusters that forget their jobs."""
    place = run / "nodes" / node_name(environ) / "ended.json"
    facts = {"attempt": attempt_of(environ), "code": code, "time": time.time()}
    place.write_text(json.dumps(facts), encoding="utf-8")
