"""What is sent to start a managed training job: pure functions from a job file, or an older job, to the request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smpkit.config.confidential import masked
from smpkit.config.job import Channel, JobConfig
from smpkit.config.section import KeyPath
from smpkit.config.wire import CHANNELS, CODE_CHANNEL, JOB_NAME, TOKEN_CHANNEL, TOKEN_NAME
from smpkit.config.words import printable
from smpkit.errors import Problem, UsageError
from smpkit_estimator.aws import request_shape
from smpkit_estimator.fields import channel_of, request_of
from smpkit_estimator.hyperparameters import hyperparameters, shown_hyperparameters
from smpkit_estimator.limits import preflight
from smpkit_estimator.sources import Packed

RESUMED_FROM = "smpkit:resumed-from"
"""Tag of a job that goes on from another: its name."""

_OPERATION = ("sagemaker", "CreateTrainingJob")


@dataclass(frozen=True)
class TrainingPlan:
    """All that will be sent, decided and checked; nothing was uploaded or started."""

    body: Mapping[str, Any]
    """Exactly what is sent as `CreateTrainingJob`."""
    source: str | None = None
    """S3 URI of the packed sources; None if another job has brought them."""
    packed: Packed | None = None
    """None if the sources are in S3 already."""
    kms_key: str | None = None
    token: str | None = None
    """Where the token goes that the hosts of this job share; None for one host."""

    def shown(self) -> dict[str, Any]:
        """The request as it may be shown: what is probably a secret is hidden."""
        hidden = {}
        if "Environment" in self.body:
            hidden["Environment"] = masked("", self.body["Environment"])
        if "HyperParameters" in self.body:
            hidden["HyperParameters"] = shown_hyperparameters(self.body["HyperParameters"])
        return {**self.body, **hidden}


def build_request(
    job: JobConfig, *, name: str, region: str, role: str, output: str, source: str, token: str | None = None
) -> dict[str, Any]:
    """Return the request for `job`, field by field as SageMaker's SDK v2 sends it for the same arguments.

    Debugger and profiler are off: they are for AWS's own images. A spot job always says how long it may wait, which the
    service asks for.

    Args:
        role: its ARN.
        output: S3 URI below which SageMaker puts the results.
        source: S3 URI of the packed sources.
        token: S3 URI of the file, called `TOKEN_NAME`, that only this job's hosts read, so that nobody else joins them;
            None for a job on one host.
    """
    inputs = dict(job.inputs)
    if job.network.isolation:
        # The container cannot reach S3, so the platform brings what it would download.
        inputs[CODE_CHANNEL] = Channel(uri=source)
        source = f"{CHANNELS}/{CODE_CHANNEL}/sourcedir.tar.gz"
        if token is not None:
            inputs[TOKEN_CHANNEL] = Channel(uri=token)
            token = f"{CHANNELS}/{TOKEN_CHANNEL}/{TOKEN_NAME}"
    body = {
        "TrainingJobName": name,
        "RoleArn": role,
        # Where the token is, and not the token: whoever may describe the job reads hyperparameters.
        "HyperParameters": hyperparameters(
            job, submit_directory=source, job_name=name, region=region, token_file=token, secret_entries=True
        ),
        **request_of(job),
        "ProfilerConfig": {"DisableProfiler": True},
    }
    body["OutputDataConfig"] = {"S3OutputPath": output, **body.get("OutputDataConfig", {})}
    if inputs:
        body["InputDataConfig"] = [channel_of(name, channel) for name, channel in inputs.items()]
    if job.compute.spot:
        stopping = body["StoppingCondition"]
        stopping.setdefault("MaxWaitTimeInSeconds", stopping["MaxRuntimeInSeconds"])
    return body


def resumed_request(
    description: Mapping[str, Any], tags: Mapping[str, str], name: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the request of a job `name` like the described one: the same sources, image, data and checkpoints.

    Args:
        changes: parts of `ResourceConfig` and `StoppingCondition` that are to be different.
    """
    old, shape = description["TrainingJobName"], request_shape(*_OPERATION)
    body: dict[str, Any] = _known(description, shape)
    body["TrainingJobName"] = name
    body["HyperParameters"] = {**body.get("HyperParameters", {}), JOB_NAME: json.dumps(name)}
    if body.get("ResourceConfig", {}).get("InstanceGroups"):
        for key, option in (("InstanceCount", "--instance-count"), ("InstanceType", "--instance-type")):
            if key in changes:
                message = f"`{option}` is for a job whose hosts are of one kind, and `{old}` has instance groups"
                raise UsageError(message, hint="submit the job file with other groups and the same `checkpoints`")
    kept = {key: value for key, value in tags.items() if not key.startswith("aws:")}
    body["Tags"] = [{"Key": key, "Value": value} for key, value in {**kept, RESUMED_FROM: old}.items()]
    for part in ("ResourceConfig", "StoppingCondition"):
        members = shape.members[part].members
        body[part] = {**body.get(part, {}), **{key: value for key, value in changes.items() if key in members}}
    return body


def _known(value: Any, shape: Any) -> Any:
    """Keep the fields of a description that a request may have: it has statuses and times as well."""
    if shape.type_name == "structure":
        return {
            name: _known(item, shape.members[name])
            for name, item in value.items()
            if name in shape.members and item not in (None, "", [], {})
        }
    if shape.type_name == "list":
        return [_known(item, shape.member) for item in value]
    return value


# ---- what is wrong with a job ----------------------------------------------------------------------------------------


def over_limits(body: Mapping[str, Any]) -> list[Problem]:
    """Return all that the service would refuse in a request, each under its name in the job file, with a hint."""
    return preflight(body, request_shape(*_OPERATION))


def hyperparameters_over_limits(sent: Mapping[str, str]) -> list[Problem]:
    """Return what the service would refuse of the hyperparameters alone."""
    return [problem for problem in over_limits({"HyperParameters": sent}) if problem.message != "is required"]


def not_for_sagemaker(job: JobConfig, *, dry: bool) -> Iterator[Problem]:
    """Yield the settings that work on this machine but not in the cloud; a dry run needs no role."""
    if job.image is None:
        hint = "push an image with smpkit to ECR, and name it `<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>`"
        yield Problem(("image",), "is required for a managed job", hint)
    elif re.match(r"[^/\s]+[.:][^/\s]*/", job.image) is None:
        message = f"names no registry, so SageMaker cannot pull it: `{printable(job.image)}`"
        yield Problem(("image",), message, "`<account>.dkr.ecr.<region>.amazonaws.com/<repository>:<tag>`")
    if job.role is None and not dry:
        yield Problem(("role",), "is required for a managed job", "the IAM role that SageMaker takes, by name or ARN")
    if job.compute.instance_type in ("local", "local_gpu"):  # as SDK v2 calls it
        hint = "set it to an instance type such as `ml.p4d.24xlarge`, or use `smpkit run`"
        yield Problem(("compute", "instance_type"), f"is `{job.compute.instance_type}`, which is this machine", hint)
    yield from _folders_here(job)
    yield from _out_of_reach(job)


def _folders_here(job: JobConfig) -> Iterator[Problem]:
    places: dict[KeyPath, str | None] = {("inputs", name, "uri"): channel.uri for name, channel in job.inputs.items()}
    places["output",] = job.output
    places["checkpoints", "uri"] = job.checkpoints.uri if job.checkpoints is not None else None
    for path, uri in places.items():
        if uri is not None and "://" not in uri:
            hint = f"copy it with `aws s3 cp --recursive {uri} s3://...`" if path[0] == "inputs" else "name an S3 URI"
            yield Problem(path, f"is a folder of this machine, `{uri}`, which SageMaker does not see", hint)


def _out_of_reach(job: JobConfig) -> Iterator[Problem]:
    """Yield what the machines or the container cannot reach over the job's network."""
    if not job.network.subnets:
        hint = "set `network: {subnets: [...], security_groups: [...]}`"
        for name, channel in job.inputs.items():
            if channel.file_system is not None:
                yield Problem(("inputs", name, "file_system"), "is in a VPC, and the job is in none", hint)
        if job.container.registry_access == "Vpc":
            yield Problem(("container", "registry_access"), "is `Vpc`, and the job is in none", hint)
    for name, secret in job.secrets.items():
        if secret.entry is None:
            hint = f"write `{name}: <name or ARN of the entry>`"
            yield Problem(("secrets", name), "names no entry in AWS Secrets Manager", hint)
        if job.network.isolation:
            hint = "SageMaker brings only channels there: put the secret in one, or give the container its network"
            yield Problem(("secrets", name), "cannot be read by a container without network", hint)
    ours = {CODE_CHANNEL: "the sources", TOKEN_CHANNEL: "the hosts' token"} if job.network.isolation else {}
    for name, what in ours.items():
        if name in job.inputs:
            yield Problem(("inputs", name), f"is the channel that brings {what} without network", "rename it")
