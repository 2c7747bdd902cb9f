"""One host of a job in a container: `python -m smpkit_container host SPEC`, a pod on Kubernetes, a node on AWS Batch.

`SPEC` is a folder with `spec.json` and, as far as the job has them, `sourcedir.tar.gz`, `token` and `secrets.json`,
mounted from a ConfigMap and a Secret; or the S3 URI of a `spec.json` that says where the rest is.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smpkit.config.wire import SUBMIT_DIRECTORY, TOKEN_FILE
from smpkit.config.words import plain
from smpkit.errors import LaunchError
from smpkit_container.described import Host, make_tree, read_spec, variables_of
from smpkit_container.s3 import fetch, put

__all__ = ["lay_out", "leave_message"]

_INDEX = ("JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_NODE_INDEX")
"""Which host this is, as Kubernetes and as AWS Batch tell it."""
_COUNT = "AWS_BATCH_JOB_NUM_NODES"
_FIRST = ("SMPKIT_FIRST_HOST", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
_MESSAGE = "SMPKIT_TERMINATION_MESSAGE"
"""The file whose text Kubernetes keeps as the reason why the container ended; on Batch a place in S3."""
_MOUNTED = {"sourcedir.tar.gz": SUBMIT_DIRECTORY, "token": TOKEN_FILE}
"""Files beside `spec.json`, and the hyperparameters by which the launcher finds them."""


def lay_out(place: str, base: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Make what the launcher reads below `base`; return the variables that the job's file has for the ranks.

    Raises:
        ConfigError: `spec.json` cannot be used.
        LaunchError: it cannot be fetched, or nobody told which host this is.
    """
    if place.startswith("s3://"):
        with tempfile.TemporaryDirectory(prefix="smpkit-job-") as folder:
            fetch(place, Path(folder) / "spec.json", "the description of the job")
            return _lay_out(Path(folder), base, environ)
    return _lay_out(Path(place), base, environ)


def _lay_out(folder: Path, base: Path, environ: Mapping[str, str]) -> dict[str, str]:
    spec = read_spec(folder / "spec.json")
    spec["hyperparameters"] |= {
        name: json.dumps(str(folder / file)) for file, name in _MOUNTED.items() if (folder / file).is_file()
    }
    host = _this_host(spec, environ)
    base.mkdir(parents=True, exist_ok=True)
    make_tree(base, spec, host)
    return variables_of(spec, folder / "secrets.json")


def _this_host(spec: Mapping[str, Any], environ: Mapping[str, str]) -> Host:
    index = next((environ[name] for name in _INDEX if environ.get(name)), None)
    if index is None:
        hint = "start this in a pod of an Indexed Job, or on a node of AWS Batch"
        raise LaunchError(f"none of {', '.join(_INDEX)} is set", hint=hint)
    # Batch tells the first host's address to the others only.
    own = "localhost" if index == "0" else None
    return Host(
        name=f"{spec['host_prefix']}-{index}",
        index=int(index),
        count=int(environ.get(_COUNT) or spec["nodes"]),
        first_address=next((environ[name] for name in _FIRST if environ.get(name)), own),
        port=spec.get("port"),
    )


def leave_message(base: Path, environ: Mapping[str, str]) -> None:
    """Leave why the job failed where Kubernetes keeps it, or in S3, with the number of this host."""
    failure, place = base / "output" / "failure", environ.get(_MESSAGE)
    if not place or not failure.is_file():
        return
    try:
        if place.startswith("s3://"):
            index = next((environ[name] for name in _INDEX if environ.get(name)), "0")
            put(failure, f"{place}/{index}", environ.get("AWS_REGION"))
        else:
            Path(place).write_bytes(failure.read_bytes())
    except (LaunchError, OSError) as error:
        os.write(2, f"the reason could not be left in {place}: {plain(str(error))}\n".encode())
