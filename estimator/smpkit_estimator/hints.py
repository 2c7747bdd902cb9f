"""From a place in the request to its name in the job file, and to the hint where a limit of the service is exceeded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smpkit.config import wire
from smpkit.config.section import KeyPath

__all__ = ["hint_for", "place_of"]

_PLACES: Mapping[KeyPath, KeyPath] = {
    ("TrainingJobName",): ("name",),
    ("HyperParameters",): ("hyperparameters",),
    ("AlgorithmSpecification", "TrainingImage"): ("image",),
    ("AlgorithmSpecification", "TrainingInputMode"): ("input_mode",),
    ("AlgorithmSpecification", "MetricDefinitions"): ("metrics",),
    ("AlgorithmSpecification", "ContainerEntrypoint"): ("container", "entry_point"),
    ("AlgorithmSpecification", "ContainerArguments"): ("container", "arguments"),
    (
        *("AlgorithmSpecification", "TrainingImageConfig", "TrainingRepositoryAuthConfig"),
        "TrainingRepositoryCredentialsProviderArn",
    ): ("container", "registry_credentials"),
    ("ExperimentConfig", "ExperimentName"): ("experiment", "name"),
    ("ExperimentConfig", "TrialName"): ("experiment", "trial"),
    ("ExperimentConfig", "TrialComponentDisplayName"): ("experiment", "display_name"),
    ("ExperimentConfig", "RunName"): ("experiment", "run"),
    ("RoleArn",): ("role",),
    ("InputDataConfig",): ("inputs",),
    ("OutputDataConfig", "S3OutputPath"): ("output",),
    ("OutputDataConfig", "KmsKeyId"): ("encryption", "output_key"),
    ("ResourceConfig", "InstanceType"): ("compute", "instance_type"),
    ("ResourceConfig", "InstanceCount"): ("compute", "instance_count"),
    ("ResourceConfig", "InstanceGroups"): ("compute", "instance_groups"),
    ("ResourceConfig", "VolumeSizeInGB"): ("compute", "volume_gb"),
    ("ResourceConfig", "VolumeKmsKeyId"): ("encryption", "volume_key"),
    ("ResourceConfig", "KeepAlivePeriodInSeconds"): ("compute", "keep_alive_seconds"),
    ("ResourceConfig", "TrainingPlanArn"): ("compute", "training_plan"),
    ("StoppingCondition", "MaxRuntimeInSeconds"): ("compute", "max_run_seconds"),
    ("StoppingCondition", "MaxWaitTimeInSeconds"): ("compute", "max_wait_seconds"),
    ("VpcConfig", "Subnets"): ("network", "subnets"),
    ("VpcConfig", "SecurityGroupIds"): ("network", "security_groups"),
    ("Tags",): ("tags",),
    ("CheckpointConfig", "S3Uri"): ("checkpoints", "uri"),
    ("CheckpointConfig", "LocalPath"): ("checkpoints", "local_path"),
    ("Environment",): ("environment",),
    ("RetryStrategy", "MaximumRetryAttempts"): ("compute", "retries"),
}

_OWN_HYPERPARAMETERS: Mapping[str, KeyPath] = {
    wire.MP_PARAMETERS: ("distribution", "smdistributed", "modelparallel", "parameters"),
    wire.MPI_OPTIONS: ("distribution", "mpi", "custom_mpi_options"),
    wire.PROGRAM: ("entry_point",),
    wire.SUBMIT_DIRECTORY: ("source_dir",),
    wire.SECRETS: ("secrets",),
}

_NAMES: Mapping[KeyPath, str] = {
    ("InputDataConfig",): "ChannelName",
    ("AlgorithmSpecification", "MetricDefinitions"): "Name",
    ("Tags",): "Key",
}
"""Lists in the request that are mappings in the job file, and what becomes the key."""

_ENDINGS: Mapping[KeyPath, KeyPath] = {
    ("DataSource", "S3DataSource", "S3Uri"): ("uri",),
    ("DataSource", "S3DataSource", "AttributeNames"): ("attribute_names",),
    ("DataSource", "S3DataSource", "InstanceGroupNames"): ("instance_groups",),
    ("DataSource", "S3DataSource", "HubAccessConfig", "HubContentArn"): ("hub_content",),
    ("DataSource", "FileSystemDataSource", "FileSystemId"): ("file_system", "id"),
    ("DataSource", "FileSystemDataSource", "DirectoryPath"): ("file_system", "path"),
    ("ContentType",): ("content_type",),
}

_GROUPS: KeyPath = ("ResourceConfig", "InstanceGroups")
_OF_GROUPS = {"InstanceGroupName": "name", "InstanceType": "instance_type", "InstanceCount": "instance_count"}

_HINTS: Mapping[KeyPath, str] = {
    ("hyperparameters",): "put it in a file in source_dir and read that in the script",
    ("environment",): "put it in a file in source_dir, or make it a hyperparameter, which may have 2,500 characters",
    ("distribution", "smdistributed"): "leave out the parameters that have their defaults",
    ("distribution", "mpi"): "set MCA parameters as variables OMPI_MCA_<name> under `environment`",
    ("image",): "`<account>.dkr.ecr.<region>.amazonaws.com/<repository>:<tag>`; `smpkit doctor` checks it",
    ("role",): "the ARN of an IAM role that SageMaker may take: `arn:aws:iam::<account>:role/<name>`",
    ("inputs",): "put data sets under one S3 prefix, as one channel",
    ("tags",): "letters, digits, spaces and _.:/=+-@ are allowed",
}


def place_of(path: KeyPath, body: Mapping[str, Any]) -> KeyPath:
    """Return the key of the job file that a field of the request comes from; the field's own path if there is none."""
    if path[:1] == ("HyperParameters",) and path[1:2] and str(path[1]) in _OWN_HYPERPARAMETERS:
        return _OWN_HYPERPARAMETERS[str(path[1])]
    for length in range(len(path), 0, -1):
        if path[:length] in _PLACES:
            return (*_PLACES[path[:length]], *_below(path, length, body))
    return path


def _below(path: KeyPath, length: int, body: Mapping[str, Any]) -> KeyPath:
    """Return the rest of a path, in the job file's words."""
    rest = path[length:]
    if path[:length] == _GROUPS:
        return tuple(_OF_GROUPS.get(str(part), part) for part in rest)
    if path[:length] not in _NAMES or not rest:
        return rest
    entries: Any = body
    for part in path[:length]:
        entries = entries[part]
    return (entries[rest[0]][_NAMES[path[:length]]], *_ENDINGS.get(rest[1:], rest[1:]))


def hint_for(place: KeyPath) -> str | None:
    """Return what to do about a limit that is exceeded at a place in the job file."""
    for length in range(len(place), 0, -1):
        if place[:length] in _HINTS:
            return _HINTS[place[:length]]
    return None
