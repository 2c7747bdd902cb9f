"""A component of TorchX, for those who use it: the hosts of a job file, on any scheduler that TorchX knows.

`torchx run --scheduler NAME FILE:job --file job.yaml`, where `FILE` is this file; later versions than 0.7 take
`smpkit_estimator.torchx:job`, too. No entry point names it: TorchX hides its own components where a package has any.

Each replica runs smpkit's launcher in the workspace that TorchX brings it. All that the launcher reads is in the
replica's arguments: TorchX cuts variables at commas on Slurm.
"""

import base64
import json
import logging
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import List, Optional  # noqa: UP035 - TorchX reads the signature, and knows no other way

from torchx import specs
from torchx.specs import macros

from smpkit.config.job import JobConfig
from smpkit.config.load import load_job
from smpkit.errors import ConfigError, Problem
from smpkit_estimator import described
from smpkit_estimator.backend import unique_name

# TorchX replaces `${...}` and makes `$` of `$$`. A first host need not be told its own address.
_SCRIPT = f"""set -e
base=$$(mktemp -d)
printf %s "$$1" | base64 -d >"$$base/spec.json"
export SMPKIT_BASE_DIR="$$base" SAGEMAKER_SUBMIT_DIRECTORY="$$PWD/$$2" TRAINING_JOB_NAME="$$3" PYTHONUNBUFFERED=1
export JOB_COMPLETION_INDEX="{macros.replica_id}" SMPKIT_FIRST_HOST="$${{{macros.rank0_env}:-localhost}}"
exec python3 -m smpkit_container host "$$base"
"""


def job(
    *overrides: str,
    file: str,
    image: str = "",
    h: str = "",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803 - as TorchX's own components have it
    port: int = 7777,
    max_retries: int = 0,
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Run a job file.

    Args:
        overrides: settings in place of those of the file, as of `smpkit run --set`
        file: the job file; it and its sources are in the workspace
        image: the container image; default: that of the job file
        h: a named resource of TorchX
        cpu: CPUs of each host, without `h`
        gpu: GPUs of each host, without `h`
        memMB: memory of each host in MB, without `h`
        port: where ranks meet, and the launchers at the next one
        max_retries: how often the scheduler may try again; the job goes on from its checkpoints
        mounts: what containers mount, as of TorchX's `dist.ddp`
    """
    loaded = load_job(file, overrides)
    config, now = loaded.config, datetime.now(timezone.utc)
    if problems := list(_problems(config)):
        raise ConfigError(described.first_of_each(problems), subject="job for TorchX")
    if unused := described.unused_settings(config):
        logging.getLogger(__name__).warning("not used with TorchX: %s", ", ".join(unused))
    name = unique_name(config.name, now)
    spec = described.described_job(config, name, now, "", kind=h or "torchx", prefix="host", port=port)
    del spec["hyperparameters"]["sagemaker_submit_directory"]  # it would win over the variable
    packed = base64.b64encode(json.dumps(spec).encode()).decode()
    code = os.path.relpath(loaded.folder / config.source_dir).replace("$", "$$")
    hosts = specs.Role(
        name="host",
        image=image or config.image or "",
        entrypoint="bash",
        args=["-c", _SCRIPT, "host", packed, code, name],
        num_replicas=config.compute.num_hosts,
        max_retries=max_retries,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h or None),
        port_map={"ranks": port, "launchers": port + 1},
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(config.name, [hosts])


def _problems(config: JobConfig) -> Iterator[Problem]:
    if config.output is None:
        yield Problem(("output",), "is required: the rest goes with the hosts", "a folder that all of them mount")
    for name in ("secrets", "dependencies"):
        if getattr(config, name):
            hint = "the image, the workspace or the scheduler brings them"
            yield Problem((name,), "do not reach the hosts through TorchX", hint)
    yield from described.not_for_schedulers(config, "TorchX")
    yield from described.place_problems(config, ["/"], "mounts")
    yield from described.world_problems(config, config.compute.num_hosts)
