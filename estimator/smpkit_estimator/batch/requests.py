"""The two requests of a job on AWS Batch, as a pure function: what `smpkit submit --dry-run` prints and boto3 sends.

Every job has a definition of its own name. Its parameters say where the job is, since Batch finds jobs by queue only,
and the name is the beginning of the names of its log streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smpkit.config.batch import Batch, BatchVolume
from smpkit.config.job import JobConfig

__all__ = ["BASE", "PLACE", "QUEUE", "BatchFacts", "definition", "submission"]

BASE = "/opt/ml"
QUEUE, PLACE = "smpkit_queue", "smpkit_place"
"""Parameters of the job's definition: its queue, and the S3 URI below which its description is."""

_STOPPED, _LOST = "143", "75"  # the launcher's exit codes, `smpkit_container.described`
_DEFAULT_GROUP = "/aws/batch/job"
_SHORTEST_LIMIT = 60
"""Seconds; Batch takes none below."""


@dataclass(frozen=True)
class BatchFacts:
    """All that the requests are made of."""

    name: str
    job: JobConfig
    region: str
    place: str
    """S3 URI below which the job's own files are."""

    @property
    def options(self) -> Batch:
        """The job file's options of Batch."""
        return self.job.backend.batch


def definition(facts: BatchFacts) -> dict[str, Any]:
    """Return the request of `RegisterJobDefinition`."""
    options, count = facts.options, facts.job.compute.num_hosts
    nodes: dict[str, Any] = {"targetNodes": f"0:{count - 1}", "container": _container(facts)}
    if options.instance_type is not None:
        nodes["instanceTypes"] = [options.instance_type]
    body: dict[str, Any] = {
        "jobDefinitionName": facts.name,
        "type": "multinode",
        "parameters": {QUEUE: str(options.queue), PLACE: facts.place},
        "nodeProperties": {"numNodes": count, "mainNode": 0, "nodeRangeProperties": [nodes]},
        "retryStrategy": {
            "attempts": options.retries,
            "evaluateOnExit": [
                # The machine is gone; or the launchers saved because it was about to go; or one host lost another.
                {"onStatusReason": "Host EC2*", "action": "RETRY"},
                {"onExitCode": _STOPPED, "action": "RETRY"},
                {"onExitCode": _LOST, "action": "RETRY"},
                {"onReason": "*", "action": "EXIT"},
            ],
        },
        "propagateTags": True,
        "tags": {"smpkit": "job", **facts.job.tags},
    }
    compute = facts.job.compute
    if "max_run_seconds" in compute.model_fields_set:
        body["timeout"] = {"attemptDurationSeconds": max(_SHORTEST_LIMIT, compute.max_run_seconds)}
    return body


def submission(facts: BatchFacts) -> dict[str, Any]:
    """Return the request of `SubmitJob`."""
    options = facts.options
    more = {"shareIdentifier": options.share, "schedulingPriorityOverride": options.priority}
    body = {"jobName": facts.name, "jobQueue": options.queue, "jobDefinition": facts.name, **more}
    return {**{name: value for name, value in body.items() if value is not None}, "tags": {"smpkit": "job"}}


def _container(facts: BatchFacts) -> dict[str, Any]:
    options = facts.options
    amounts = [("VCPU", options.cpus), ("MEMORY", options.memory_mib)]
    if options.gpus:
        amounts.append(("GPU", options.gpus))
    variables = {
        "SMPKIT_BASE_DIR": BASE,
        "SMPKIT_TERMINATION_MESSAGE": f"{facts.place}/failures",
        "PYTHONUNBUFFERED": "1",
        "TRAINING_JOB_NAME": facts.name,
        "AWS_REGION": facts.region,
    }
    container: dict[str, Any] = {
        "image": facts.job.image,
        # Behind the image's entry point.
        "command": ["host", f"{facts.place}/spec.json"],
        "environment": [{"name": name, "value": value} for name, value in variables.items()],
        "resourceRequirements": [{"type": kind, "value": str(amount)} for kind, amount in amounts],
        "linuxParameters": _linux(options),
        "jobRoleArn": options.role or facts.job.role,
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
        prefix = {"awslogs-group": options.log_group, "awslogs-stream-prefix": facts.name}
        container["logConfiguration"] = {"logDriver": "awslogs", "options": prefix}
    return container


def _linux(options: Batch) -> Mapping[str, Any]:
    shared = options.shared_memory_mib or max(64, options.memory_mib // 2)
    devices = [f"/dev/infiniband/uverbs{index}" for index in range(options.efa)]
    found: dict[str, Any] = {"sharedMemorySize": shared}
    if devices:
        rights = ["READ", "WRITE", "MKNOD"]
        found["devices"] = [{"hostPath": path, "containerPath": path, "permissions": rights} for path in devices]
    return found


def _volume(index: int, volume: BatchVolume) -> dict[str, Any]:
    if volume.efs is not None:
        efs = {"fileSystemId": volume.efs, "transitEncryption": "ENABLED"}
        return {"name": f"volume-{index}", "efsVolumeConfiguration": efs}
    return {"name": f"volume-{index}", "host": {"sourcePath": volume.host_path}}
