"""A host of a job that a scheduler starts: from its variables to what the launcher reads on SageMaker.

`smpkit submit` leaves the job's files where every host finds them: in the folder of a run on Slurm, mounted on
Kubernetes, in S3 for AWS Batch. The scheduler says which of the hosts this is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.config import scheduled as names
from smpkit.config.wire import HOMOGENEOUS
from smpkit.config.words import plain
from smpkit.errors import LaunchError
from smpkit_container.aws import fetch, put

_INDEX = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_NODE_INDEX")
"""Which host this is, as Slurm, Kubernetes and AWS Batch tell it."""
_FIRST = (names.FIRST_HOST, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
_CONFIG = ("hyperparameters.json", "inputdataconfig.json")


def described_hosts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what `resourceconfig.json` would say; empty if no variable tells of hosts.

    Beside the file's own keys there are `first_address`, where the first host is reached, and `port`.
    """
    hosts = environ.get(names.HOSTS, "").split()
    if not hosts:
        return {}
    index = next((environ[name] for name in _INDEX if environ.get(name)), "")
    if not index.isdecimal() or int(index) >= len(hosts):
        hint = "start this with `srun`, in a pod of an Indexed Job, or on a node of AWS Batch"
        raise LaunchError(f"none of {', '.join(_INDEX)} is the number of one of {len(hosts)} hosts", hint=hint)
    machine = environ.get(names.MACHINE) or "local"
    group = {"instance_group_name": HOMOGENEOUS, "instance_type": machine, "hosts": hosts}
    return {
        "current_host": hosts[int(index)],
        "current_instance_type": machine,
        "current_group_name": HOMOGENEOUS,
        "hosts": hosts,
        "instance_groups": [group],
        "network_interface_name": environ.get(names.INTERFACE) or "",
        # Batch tells the first host's address to the others only.
        "first_address": next((environ[name] for name in _FIRST if environ.get(name)), "localhost"),
        **({"port": int(environ[names.PORT])} if environ.get(names.PORT) else {}),
    }


def lay_out(environ: Mapping[str, str]) -> dict[str, str]:
    """Make what the launcher reads below its base folder; return its variables, with those of the job's file."""
    variables = dict(environ)
    if environ.get(names.VARIABLES):
        variables |= _variables(Path(environ[names.VARIABLES]))
    host = described_hosts(variables)["current_host"]
    base = Path(variables["SMPKIT_BASE_DIR"].replace("{host}", host))
    (base / "output").mkdir(parents=True, exist_ok=True)
    (base / "output" / "failure").unlink(missing_ok=True)  # of the attempt before
    for part, place in json.loads(variables.get(names.PLACES) or "{}").items():
        _link(base / part, Path(place), is_result=not part.startswith("input"))
    if variables.get(names.CONFIG):
        config = base / "input" / "config"
        config.mkdir(parents=True, exist_ok=True)
        for name in _CONFIG:
            uri = f"{variables[names.CONFIG]}/{name}"
            fetch(uri, config / name, "the description of the job", variables.get("AWS_REGION"))
    return {**variables, "SMPKIT_BASE_DIR": str(base)}


def _variables(path: Path) -> dict[str, str]:
    try:
        return {name: str(value) for name, value in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise LaunchError(f"the job's variables {path} cannot be read: {error}") from None


def _link(link: Path, target: Path, *, is_result: bool) -> None:
    """Let a folder below the base lie elsewhere; what the job writes to is made there."""
    if is_result:
        target.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target, target_is_directory=True)


def leave_message(base: Path, environ: Mapping[str, str]) -> None:
    """Leave why the job failed where Kubernetes keeps it, or in S3 under the name of this host."""
    failure, place = base / "output" / "failure", environ.get(names.MESSAGE)
    if not place or not failure.is_file():
        return
    try:
        if place.startswith("s3://"):
            put(failure, f"{place}/{described_hosts(environ)['current_host']}", environ.get("AWS_REGION"))
        else:
            Path(place).write_bytes(failure.read_bytes())
    except (LaunchError, OSError) as error:
        os.write(2, f"the reason could not be left in {place}: {plain(str(error))}\n".encode())
