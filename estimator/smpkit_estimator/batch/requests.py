"""The two requests of a job on AWS Batch, as a pure function: what `smpkit submit --dry-run` prints and boto3 sends.

Every job has a definition of its own name, which is the beginning of the names of its log streams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smpkit.config import scheduled as names
from smpkit.config.batch import Batch, BatchVolume
from smpkit.config.confidential import masked
from smpkit.config.job import JobConfig
from smpkit_estimator.scheduled import host_variables, limit_of, places_in_volumes

__all__ = ["PLACE", "SHORTEST_LIMIT", "definition", "shown_definition", "staging_of", "submission"]

PLACE = "smpkit_place"
"""Parameter of the job: the S3 URI below which its files are."""

_BASE = "/opt/ml"
_DEFAULT_GROUP = "/aws/batch/job"
SHORTEST_LIMIT = 60
"""Seconds; Batch takes none below."""


def definition(job: JobConfig, name: str, region: str, place: str) -> dict[str, Any]:
    """Return the request of `RegisterJobDefinition`.

    Args:
        place: S3 URI below which the job's own files are.
    """
    options, count = job.backend.batch, job.compute.instance_count
    nodes: dict[str, Any] = {"targetNodes": f"0:{count - 1}", "container": _container(job, name, region, place)}
    if options.instance_type is not None:
        nodes["instanceTypes"] = [options.instance_type]
    body: dict[str, Any] = {
        "jobDefinitionName": name,
        "type": "multinode",
        "parameters": {PLACE: place},
        "nodeProperties": {"numNodes": count, "mainNode": 0, "nodeRangeProperties": [nodes]},
        "retryStrategy": {
            "attempts": options.retries,
            "evaluateOnExit": [
                # The machine is gone; or the launchers saved because it was about to go; or one host lost another.
                {"onStatusReason": "Host EC2*", "action": "RETRY"},
                {"onExitCode": str(names.STOPPED), "action": "RETRY"},
                {"onExitCode": str(names.LOST), "action": "RETRY"},
                {"onReason": "*", "action": "EXIT"},
            ],
        },
        "propagateTags": True,
        "tags": {"smpkit": "job", **job.tags},
    }
    limit = limit_of(job)
    if limit is not None:
        body["timeout"] = {"attemptDurationSeconds": max(SHORTEST_LIMIT, limit)}
    return body


def submission(job: JobConfig, name: str) -> dict[str, Any]:
    """Return the request of `SubmitJob`, but for the definition's revision."""
    options = job.backend.batch
    more = {"shareIdentifier": options.share, "schedulingPriorityOverride": options.priority}
    body = {"jobName": name, "jobQueue": options.queue, "jobDefinition": name, **more}
    return {**{key: value for key, value in body.items() if value is not None}, "tags": {"smpkit": "job"}}


def shown_definition(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of `RegisterJobDefinition` without secrets."""
    shown: dict[str, Any] = json.loads(json.dumps(body))
    for each in shown["nodeProperties"]["nodeRangeProperties"][0]["container"]["environment"]:
        each["value"] = masked(each["name"], each["value"])
    return shown


def staging_of(job: JobConfig) -> str:
    """Return the S3 URI below which files are put; empty if the job file names none."""
    return (job.backend.batch.staging or job.code_location or "").rstrip("/")


def _container(job: JobConfig, name: str, region: str, place: str) -> dict[str, Any]:
    options = job.backend.batch
    amounts = [("VCPU", options.cpus), ("MEMORY", options.memory_mib), ("GPU", options.gpus)]
    variables = {
        **host_variables(
            job,
            name,
            base=_BASE,
            machine=options.instance_type or "batch",
            places=places_in_volumes(job, name),
            grace_seconds=options.grace_seconds,
            port=options.port,
        ),
        names.HOSTS: " ".join(f"node-{index}" for index in range(job.compute.instance_count)),
        names.CONFIG: place,
        names.MESSAGE: f"{place}/failures",
        "AWS_REGION": region,
    }
    container: dict[str, Any] = {
        "image": job.image,
        "command": ["train"],  # behind the image's entry point
        "environment": [{"name": key, "value": value} for key, value in variables.items()],
        "resourceRequirements": [{"type": kind, "value": str(amount)} for kind, amount in amounts if amount],
        "linuxParameters": _linux(options),
        "jobRoleArn": options.role or job.role,
        "privileged": options.privileged,
    }
    if options.efa:  # it registers memory
        container["ulimits"] = [{"name": "memlock", "hardLimit": -1, "softLimit": -1}]
    if options.volumes:
        container["volumes"] = [_volume(index, each) for index, each in enumerate(options.volumes)]
        container["mountPoints"] = [
            {"sourceVolume": f"volume-{index}", "containerPath": each.mount, "readOnly": each.read_only}
            for index, each in enumerate(options.volumes)
        ]
    if options.log_group != _DEFAULT_GROUP:
        prefix = {"awslogs-group": options.log_group, "awslogs-stream-prefix": name}
        container["logConfiguration"] = {"logDriver": "awslogs", "options": prefix}
    return container


def _linux(options: Batch) -> Mapping[str, Any]:
    shared = options.shared_memory_mib or max(64, options.memory_mib // 2)
    rights = ["READ", "WRITE", "MKNOD"]
    paths = [f"/dev/infiniband/uverbs{index}" for index in range(options.efa)]
    devices = [{"hostPath": path, "containerPath": path, "permissions": rights} for path in paths]
    return {"sharedMemorySize": shared, **({"devices": devices} if devices else {})}


def _volume(index: int, volume: BatchVolume) -> dict[str, Any]:
    if volume.efs is not None:
        efs = {"fileSystemId": volume.efs, "transitEncryption": "ENABLED"}
        return {"name": f"volume-{index}", "efsVolumeConfiguration": efs}
    return {"name": f"volume-{index}", "host": {"sourcePath": volume.host_path}}
