"""Where each setting of a job file is in SDK v2's estimators and in SageMaker's `CreateTrainingJob`: one table.

The request is made from it, arguments of `Estimator` are read by it, and limits of the service are told by it under the
name that the user wrote.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from smpkit.config import wire
from smpkit.config.job import Channel, JobConfig
from smpkit.config.section import KeyPath
from smpkit.config.words import quoted
from smpkit.errors import Problem

# ---- values, on their way into the request and from SDK v2's arguments -----------------------------------------------


def _unless_off(value: Any) -> Any:
    return None if value is False or value == "" else value


def _as_it_is(value: Any) -> Any:
    return value


def _later(_: Any) -> None:
    """Leave out what the job file alone does not say: see `sagemaker`."""


def _pairs(key: str, item: str) -> Callable[[Mapping[str, str]], list[dict[str, str]]]:
    return lambda values: [{key: name, item: value} for name, value in values.items()]


def _mapping(key: str, item: str) -> Callable[[Any], Any]:
    """Return what makes a mapping of SageMaker's pairs; anything else is left to validation."""

    def read(value: Any) -> Any:
        if isinstance(value, list) and all(isinstance(pair, Mapping) and {key, item} <= {*pair} for pair in value):
            return {pair[key]: pair[item] for pair in value}
        return value

    return read


def _path(value: Any) -> Any:
    """Make text of a path, or of each of several."""
    if isinstance(value, (list, tuple)):
        return [_path(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _json(value: Any) -> Any:
    """Make lists of tuples, as JSON does."""
    if isinstance(value, Mapping):
        return {name: _json(item) for name, item in value.items()}
    return [_json(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One setting: its key in the job file, SDK v2's argument, and its path in the request."""

    job: str
    sdk: str | None
    request: str | None = None
    make: Callable[[Any], Any] = _unless_off
    """Turns the job file's value into the request's; None leaves it out."""
    read: Callable[[Any], Any] = _as_it_is
    """Turns the argument's value into the job file's."""


_IMAGE = "AlgorithmSpecification"
_REGISTRY = f"{_IMAGE}.TrainingImageConfig"

FIELDS = (
    #     the job file             SDK v2's argument                 CreateTrainingJob
    Field("name",                  "base_job_name",                  "TrainingJobName", _later),
    Field("entry_point",           "entry_point",                    read=_path),
    Field("source_dir",            "source_dir",                     read=_path),
    Field("dependencies",          "dependencies",                   read=_path),
    Field("distribution",          "distribution"),
    Field("secrets",               "secrets"),
    Field("code_location",         "code_location"),
    Field("container.log_level",   "container_log_level"),
    Field("role",                  "role",                           "RoleArn", _later),
    Field("image",                 "image_uri",                      f"{_IMAGE}.TrainingImage"),
    Field("input_mode",            "input_mode",                     f"{_IMAGE}.TrainingInputMode"),
    Field("container.entry_point", "container_entry_point",          f"{_IMAGE}.ContainerEntrypoint"),
    Field("container.arguments",   "container_arguments",            f"{_IMAGE}.ContainerArguments"),
    Field("container.registry_access", "training_repository_access_mode", f"{_REGISTRY}.TrainingRepositoryAccessMode"),
    Field("container.registry_credentials", "training_repository_credentials_provider_arn",
          f"{_REGISTRY}.TrainingRepositoryAuthConfig.TrainingRepositoryCredentialsProviderArn"),
    Field("metrics",               "metric_definitions",             f"{_IMAGE}.MetricDefinitions",
          _pairs("Name", "Regex"), _mapping("Name", "Regex")),
    Field("hyperparameters",       "hyperparameters",                "HyperParameters", _later, _json),
    Field("environment",           "environment",                    "Environment"),
    Field("inputs",                None,                             "InputDataConfig", _later),
    Field("output",                "output_path",                    "OutputDataConfig.S3OutputPath", _later),
    Field("encryption.output_key", "output_kms_key",                 "OutputDataConfig.KmsKeyId"),
    Field("compress_output",       "disable_output_compression",     "OutputDataConfig.CompressionType",
          lambda on: None if on else "NONE", lambda off: not off if isinstance(off, bool) else off),
    Field("compute.instance_type", "instance_type",                  "ResourceConfig.InstanceType"),
    Field("compute.instance_count", "instance_count",                "ResourceConfig.InstanceCount"),
    Field("compute.volume_gb",     "volume_size",                    "ResourceConfig.VolumeSizeInGB"),
    Field("encryption.volume_key", "volume_kms_key",                 "ResourceConfig.VolumeKmsKeyId"),
    Field("compute.keep_alive_seconds", "keep_alive_period_in_seconds", "ResourceConfig.KeepAlivePeriodInSeconds"),
    Field("compute.training_plan", "training_plan",                  "ResourceConfig.TrainingPlanArn"),
    Field("compute.max_run_seconds", "max_run",                      "StoppingCondition.MaxRuntimeInSeconds"),
    Field("compute.max_wait_seconds", "max_wait",                    "StoppingCondition.MaxWaitTimeInSeconds"),
    Field("compute.spot",          "use_spot_instances",             "EnableManagedSpotTraining"),
    Field("compute.retries",       "max_retry_attempts",             "RetryStrategy.MaximumRetryAttempts"),
    Field("compute.infra_check",   "enable_infra_check",             "InfraCheckConfig.EnableInfraCheck", _as_it_is),
    Field("container.remote_debug", "enable_remote_debug",           "RemoteDebugConfig.EnableRemoteDebug", _as_it_is),
    Field("checkpoints.uri",       "checkpoint_s3_uri",              "CheckpointConfig.S3Uri"),
    Field("checkpoints.local_path", "checkpoint_local_path",         "CheckpointConfig.LocalPath"),
    Field("network.subnets",       "subnets",                        "VpcConfig.Subnets"),
    Field("network.security_groups", "security_group_ids",           "VpcConfig.SecurityGroupIds"),
    Field("network.isolation",     "enable_network_isolation",       "EnableNetworkIsolation"),
    Field("network.encrypt_traffic", "encrypt_inter_container_traffic", "EnableInterContainerTrafficEncryption"),
    Field("experiment.name",       None,                             "ExperimentConfig.ExperimentName"),
    Field("experiment.trial",      None,                             "ExperimentConfig.TrialName"),
    Field("experiment.display_name", None,                           "ExperimentConfig.TrialComponentDisplayName"),
    Field("experiment.run",        None,                             "ExperimentConfig.RunName"),
    Field("tags",                  "tags",                           "Tags",
          _pairs("Key", "Value"), _mapping("Key", "Value")),
)  # fmt: skip

CHANNEL: Mapping[str, str] = {
    "uri":                "DataSource.S3DataSource.S3Uri",
    "data_type":          "DataSource.S3DataSource.S3DataType",
    "attribute_names":    "DataSource.S3DataSource.AttributeNames",
    "accept_eula":        "DataSource.S3DataSource.ModelAccessConfig.AcceptEula",
    "hub_content":        "DataSource.S3DataSource.HubAccessConfig.HubContentArn",
    "file_system.id":     "DataSource.FileSystemDataSource.FileSystemId",
    "file_system.type":   "DataSource.FileSystemDataSource.FileSystemType",
    "file_system.path":   "DataSource.FileSystemDataSource.DirectoryPath",
    "file_system.access": "DataSource.FileSystemDataSource.FileSystemAccessMode",
    "compression":        "CompressionType",
    "content_type":       "ContentType",
    "record_wrapping":    "RecordWrapperType",
    "mode":               "InputMode",
    "shuffle_seed":       "ShuffleConfig.Seed",
}  # fmt: skip
"""The same for one entry of `inputs` and of `InputDataConfig`; SDK v2's inputs hold the latter."""

_SHARDED = "DataSource.S3DataSource.S3DataDistributionType"
_DISTRIBUTIONS = {"ShardedByS3Key": True, "FullyReplicated": False}

ARGUMENTS: Mapping[str, Field] = {field.sdk: field for field in FIELDS if field.sdk is not None}
"""By the arguments of SDK v2's estimators."""

EXPERIMENT: Mapping[str, str] = {
    field.request.partition(".")[2]: field.job.partition(".")[2]
    for field in FIELDS
    if field.request is not None and field.job.startswith("experiment.")
}
"""SDK v2's `experiment_config`: its keys, and those of `experiment` in the job file."""

_HYPERPARAMETERS: Mapping[str, str] = {
    wire.MP_PARAMETERS: "distribution.smdistributed.modelparallel.parameters",
    wire.MPI_OPTIONS: "distribution.mpi.custom_mpi_options",
    wire.PROGRAM: "entry_point",
    wire.SUBMIT_DIRECTORY: "source_dir",
    wire.SECRETS: "secrets",
}
"""Hyperparameters that other settings become."""

_HINTS: Mapping[str, str] = {
    "hyperparameters": "put it in a file in source_dir and read that in the script",
    "environment": "put it in a file in source_dir, or make it a hyperparameter, which may have 2,500 characters",
    "distribution.smdistributed": "leave out the parameters that have their defaults",
    "distribution.mpi": "set MCA parameters as variables OMPI_MCA_<name> under `environment`",
    "image": "`<account>.dkr.ecr.<region>.amazonaws.com/<repository>:<tag>`; `smpkit doctor` checks it",
    "role": "the ARN of an IAM role that SageMaker may take: `arn:aws:iam::<account>:role/<name>`",
    "inputs": "put data sets under one S3 prefix, as one channel",
    "tags": "letters, digits, spaces and _.:/=+-@ are allowed",
}
"""What to do where a limit is exceeded."""


# ---- into the request ------------------------------------------------------------------------------------------------


def request_of(job: JobConfig) -> dict[str, Any]:
    """Return what the job file says of `CreateTrainingJob`."""
    body: dict[str, Any] = {}
    for field in FIELDS:
        value = _value(job, field.job)
        if field.request is not None and value is not None and value not in ([], {}):
            put(body, field.request, field.make(value))
    return body


def channel_of(name: str, channel: Channel) -> dict[str, Any]:
    """Return one entry of `InputDataConfig`."""
    body: dict[str, Any] = {"ChannelName": name}
    for ours, theirs in CHANNEL.items():
        value = _value(channel, ours)
        if value != [] and (channel.file_system is None or "S3DataSource" not in theirs):
            put(body, theirs, value)
    if channel.file_system is None:
        put(body, _SHARDED, "ShardedByS3Key" if channel.sharded else "FullyReplicated")
    return body


def put(body: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at a path with dots between; None is left out."""
    if value is None:
        return
    *outer, last = path.split(".")
    for part in outer:
        body = body.setdefault(part, {})
    body[last] = value


def _value(settings: Any, path: str) -> Any:
    """Return a setting; None where the request is to say nothing of it."""
    if path == "environment":
        return settings.variables
    for part in path.split("."):
        if settings is None or (part == "local_path" and part not in settings.model_fields_set):
            return None
        settings = getattr(settings, part)
    return settings


# ---- back from the request -------------------------------------------------------------------------------------------


def read_channel(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return a channel as a job file has it, of its form in a request; and a problem for each field that it lacks."""
    ours = {theirs: ours for ours, theirs in CHANNEL.items()}
    data: dict[str, Any] = {}
    problems = []
    for path, value in _leaves(config):
        if path == _SHARDED and value in _DISTRIBUTIONS:
            data["sharded"] = _DISTRIBUTIONS[value]
        elif path in ours:
            put(data, ours[path], value)
        else:
            hint = "remove it: no channel of a training job has it here, so it would be lost"
            problems.append(Problem((path.rpartition(".")[2],), f"cannot be sent, got {quoted(value)}", hint))
    return data, problems


def _leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{above}{name}.")
        elif item is not None:
            yield f"{above}{name}", item


def place_of(path: KeyPath, body: Mapping[str, Any]) -> KeyPath:
    """Return the key of the job file that a field of the request comes from; the field's own path if there is none."""
    if path[:1] == ("HyperParameters",) and path[1:2] and path[1] in _HYPERPARAMETERS:
        return tuple(_HYPERPARAMETERS[str(path[1])].split("."))
    for field in FIELDS:
        theirs = tuple(field.request.split(".")) if field.request is not None else ("",)
        if path[: len(theirs)] == theirs:
            below = path[len(theirs) :]
            entries = functools.reduce(operator.getitem, theirs, body) if below else None
            return (*field.job.split("."), *_below(field.job, below, entries))
    return path


def _below(key: str, path: KeyPath, entries: Any) -> KeyPath:
    """Return the rest of a path, in the job file's words: some lists of the request are mappings there."""
    names = {"inputs": "ChannelName", "metrics": "Name", "tags": "Key"}
    if key not in names or not path:
        return path
    name, rest = entries[path[0]][names[key]], path[1:]
    if key == "inputs":
        for ours, theirs in CHANNEL.items():
            if rest[: theirs.count(".") + 1] == tuple(theirs.split(".")):
                rest = (*ours.split("."), *rest[theirs.count(".") + 1 :])
    return (name, *rest)


def hint_for(place: KeyPath) -> str | None:
    """Return what to do about a limit that is exceeded at a place in the job file."""
    names = ".".join(map(str, place)) + "."
    return next((hint for key, hint in _HINTS.items() if names.startswith(f"{key}.")), None)
