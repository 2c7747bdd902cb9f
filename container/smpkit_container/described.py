"""Hosts of schedulers that know nothing of `/opt/ml`: make of a job's `spec.json` what the launcher reads there.

`smpkit submit` writes the file; on Slurm it lies in the run's folder, in a pod it is mounted, on AWS Batch it comes
from S3. Hosts need no names of each other: the scheduler tells the first one's address, how many there are, and which
of them this is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smpkit.errors import ConfigError, LaunchError, Problem

__all__ = ["LOST", "STOPPED", "Host", "make_tree", "read_spec", "variables_of"]

STOPPED = 143
"""Exit code of a launcher whose ranks have saved after SIGTERM, as a shell has it: the scheduler starts it again,
unless somebody stopped the job."""

LOST = 75
"""Exit code of a launcher that ended because another host was lost (`EX_TEMPFAIL`): worth another try."""

_PARTS = ("hyperparameters", "inputs", "environment", "channels", "places")


@dataclass(frozen=True)
class Host:
    """One host among those of its job."""

    name: str
    index: int
    count: int
    first_address: str | None = None
    """Where the first host is reached; one host alone needs none."""
    port: int | None = None
    """Where the ranks meet, and at the next one the launchers; None = the launcher's default."""


def read_spec(path: Path) -> dict[str, Any]:
    """Read what `smpkit submit` wrote.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        spec = dict(json.loads(path.read_bytes()))
        for part in _PARTS:
            spec[part] = dict(spec[part])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"cannot be used: {type(error).__name__}: {error}"
        raise ConfigError([Problem((str(path),), message)], subject="description of the job") from None
    return spec


def variables_of(spec: Mapping[str, Any], secrets: Path) -> dict[str, str]:
    """Return the variables that the job file has for the ranks, with those of its secrets, if there are any."""
    hidden = json.loads(secrets.read_bytes()) if secrets.is_file() else {}
    return {name: str(value) for name, value in {**spec["environment"], **hidden}.items()}


def make_tree(base: Path, spec: Mapping[str, Any], host: Host) -> None:
    """Make below `base` what stands for `/opt/ml`; places that the job names are links to them.

    Raises:
        LaunchError: there are other hosts, and nobody told the first one's address.
    """
    places: dict[str, str] = spec["places"]
    resources = _resources(spec, host)
    shutil.rmtree(base / "input", ignore_errors=True)  # of the attempt before
    (base / "output" / "failure").unlink(missing_ok=True)
    config = base / "input" / "config"
    config.mkdir(parents=True)
    (base / "output").mkdir(exist_ok=True)
    (base / "input" / "data").mkdir()
    for channel, place in spec["inputs"].items():
        (base / "input" / "data" / channel).symlink_to(place)
    for part, place in places.items():
        Path(place).mkdir(parents=True, exist_ok=True)
        _link(base / part, Path(place))
    files: dict[str, Any] = {
        "hyperparameters": spec["hyperparameters"],
        "resourceconfig": resources,
        "inputdataconfig": spec["channels"],
        "checkpointconfig": {"LocalPath": places.get("checkpoints") or str(base / "checkpoints")},
    }
    for file, value in files.items():
        (config / f"{file}.json").write_text(json.dumps(value, indent=2), encoding="utf-8")


def _resources(spec: Mapping[str, Any], host: Host) -> dict[str, Any]:
    common = {
        "current_host": host.name,
        "current_instance_type": spec["instance_type"],
        "current_group_name": "homogeneousCluster",
        "network_interface_name": spec.get("interface") or "",
    }
    if host.count == 1:
        return {**common, "hosts": [host.name], **_group(spec, [host.name])}
    if not host.first_address:
        raise LaunchError("the address of the job's first host is not known", hint="the scheduler sets it")
    known = {"first_host": host.first_address, "host_count": host.count, "host_index": host.index}
    port = {} if host.port is None else {"port": host.port}
    return {**common, **known, **port, **_group(spec, [])}


def _group(spec: Mapping[str, Any], hosts: list[str]) -> dict[str, Any]:
    one = {"instance_group_name": "homogeneousCluster", "instance_type": spec["instance_type"], "hosts": hosts}
    return {"instance_groups": [one]}


def _link(link: Path, target: Path) -> None:
    if link == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target, target_is_directory=True)
