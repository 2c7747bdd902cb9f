"""One node of a Slurm job: `python -m smpkit_container slurm RUN [-- script arguments...]`, started by srun on each.

`RUN` is the folder of the run, made by `smpkit submit`, which every node sees. From its `spec.json` and the variables
of the step this makes what the platform describes below `/opt/ml` for the launcher, in `RUN/nodes/<node>`. Slurm starts
the next attempt of a job that was preempted in the same folder.

Nodes need no names of each other: the script of the batch job tells the address of the first one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.errors import ConfigError, LaunchError, Problem

__all__ = ["STOPPED", "attempt_of", "lay_out", "node_name", "note_end", "open_log", "port_of"]

STOPPED = 143
"""Exit code of a launcher whose ranks have saved after SIGTERM, as a shell has it; the batch script tells by it whether
to queue the job again."""

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
    try:
        spec = json.loads((run / "spec.json").read_bytes())
        hyperparameters, places = dict(spec["hyperparameters"]), dict(spec["places"])
        inputs, environment = dict(spec["inputs"]), dict(spec["environment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"cannot be used: {type(error).__name__}: {error}"
        raise ConfigError([Problem((str(run / "spec.json"),), message)], subject="folder of the run") from None
    name = node_name(environ)
    base = run / "nodes" / name
    shutil.rmtree(base / "input", ignore_errors=True)  # of the attempt before
    (base / "output" / "failure").unlink(missing_ok=True)
    config = base / "input" / "config"
    config.mkdir(parents=True)
    (base / "output").mkdir(exist_ok=True)
    (base / "input" / "data").mkdir()
    for channel, place in inputs.items():
        (base / "input" / "data" / channel).symlink_to(place)
    for part, place in places.items():
        Path(place).mkdir(parents=True, exist_ok=True)
        _link(base / part, Path(place))
    files: dict[str, Any] = {
        "hyperparameters": hyperparameters,
        "resourceconfig": _resources(spec, name, environ),
        "inputdataconfig": spec["channels"],
        "checkpointconfig": {"LocalPath": places["checkpoints"]},
    }
    for file, value in files.items():
        (config / f"{file}.json").write_text(json.dumps(value, indent=2), encoding="utf-8")
    secrets = run / "secrets.json"
    if secrets.is_file():
        environment |= json.loads(secrets.read_bytes())
    return base, {name: str(value) for name, value in environment.items()}


def _resources(spec: Mapping[str, Any], name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    number, count = int(environ["SLURM_NODEID"]), int(environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_NNODES"])
    common = {
        "current_host": name,
        "current_instance_type": spec["instance_type"],
        "current_group_name": "homogeneousCluster",
        "network_interface_name": spec.get("interface") or "",
    }
    if count == 1:
        return {**common, "hosts": [name], **_group(spec, [name])}
    address = environ.get("SMPKIT_FIRST_HOST")
    if not address:
        raise LaunchError("SMPKIT_FIRST_HOST is not set", hint="the batch script sets it to the first node's address")
    known = {"first_host": address, "host_count": count, "host_index": number, "port": port_of(environ)}
    return {**common, **known, **_group(spec, [])}


def _group(spec: Mapping[str, Any], hosts: list[str]) -> dict[str, Any]:
    one = {"instance_group_name": "homogeneousCluster", "instance_type": spec["instance_type"], "hosts": hosts}
    return {"instance_groups": [one]}


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target, target_is_directory=True)


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
