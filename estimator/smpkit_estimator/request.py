"""Build the request of a managed training job: a pure function from the job file to what `CreateTrainingJob` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smpkit.config.confidential import masked
from smpkit.config.job import Channel, FileSystem, InstanceGroup, JobConfig
from smpkit.config.wire import CHANNELS, CODE_CHANNEL, SECRETS, TOKEN_CHANNEL, TOKEN_FILE, TOKEN_NAME
from smpkit_estimator.hyperparameters import hyperparameters
from smpkit_estimator.status import machines_of

__all__ = ["SubmitContext", "TrainingRequest", "build_request"]

_ARCHIVE_IN_CONTAINER = f"{CHANNELS}/{CODE_CHANNEL}/sourcedir.tar.gz"
_TOKEN_IN_CONTAINER = f"{CHANNELS}/{TOKEN_CHANNEL}/{TOKEN_NAME}"


@dataclass(frozen=True)
class SubmitContext:
    """What the job file does not say: who submits where, and under which name."""

    job_name: str
    region: str
    role: str
    """ARN of the role that SageMaker takes."""
    output: str
    """S3 URI below which SageMaker puts the results."""
    source: str
    """S3 URI of the packed sources."""
    token: str | None = None
    """S3 URI of the file that only this job's hosts read, so that nobody else joins them; None for a job on one host.

    It ends with `TOKEN_NAME`.
    """


@dataclass(frozen=True)
class TrainingRequest:
    """Exactly what is sent as `CreateTrainingJob`; `smpkit submit --dry-run` prints it as `shown`."""

    body: Mapping[str, Any]

    @property
    def job_name(self) -> str:
        """The unique name of the job."""
        name: str = self.body["TrainingJobName"]
        return name

    @property
    def job_names(self) -> tuple[str]:
        """The one job that it starts."""
        return (self.job_name,)

    @property
    def machines(self) -> str:
        """On what, in words."""
        kinds = " + ".join(f"{each.instance_count} × {each.instance_type}" for each in machines_of(self.body))
        return f"{kinds}, spot" if self.body.get("EnableManagedSpotTraining") else kinds

    @property
    def max_seconds(self) -> int | None:
        """How long the job may run."""
        seconds: int | None = self.body.get("StoppingCondition", {}).get("MaxRuntimeInSeconds")
        return seconds

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing that the user need know."""
        return ()

    def text(self) -> str:
        """The request as YAML."""
        import yaml

        text: str = yaml.safe_dump(self.shown(), sort_keys=False, allow_unicode=True, width=120)
        return text

    def to_json(self) -> str:
        """The request as readable JSON."""
        return json.dumps(self.body, indent=2)

    def shown(self) -> dict[str, Any]:
        """The request as it may be shown: what is probably a secret is hidden."""
        body = dict(self.body)
        if "Environment" in body:
            body["Environment"] = masked("", body["Environment"])
        if "HyperParameters" in body:
            body["HyperParameters"] = {name: _masked(name, text) for name, text in body["HyperParameters"].items()}
        return body


def _masked(name: str, text: str) -> str:
    """Hide secrets in a hyperparameter, which is JSON unless somebody else sent it."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    hidden = masked(name, value)
    return text if hidden == value else json.dumps(hidden)


def build_request(job: JobConfig, context: SubmitContext) -> TrainingRequest:
    """Return the request for `job`, field by field as SageMaker's SDK v2 sends it for the same arguments.

    Debugger and profiler are off: they are for AWS's own images. A spot job always says how long it may wait, which the
    service asks for.
    """
    body: dict[str, Any] = {
        "AlgorithmSpecification": _algorithm(job),
        "OutputDataConfig": _output(job, context),
        "TrainingJobName": context.job_name,
        "StoppingCondition": _stopping(job),
        "ResourceConfig": _resources(job),
        "RoleArn": context.role,
        "InputDataConfig": _channels(job, context),
        "HyperParameters": {
            **hyperparameters(
                job,
                submit_directory=_ARCHIVE_IN_CONTAINER if job.network.isolation else context.source,
                job_name=context.job_name,
                region=context.region,
            ),
            **_secrets(job),
            **_token(job, context),
        },
        "Environment": dict(job.variables),
        "Tags": [{"Key": key, "Value": value} for key, value in job.tags.items()],
        "VpcConfig": _vpc(job),
        "EnableNetworkIsolation": job.network.isolation,
        "EnableInterContainerTrafficEncryption": job.network.encrypt_traffic,
        "EnableManagedSpotTraining": job.compute.spot,
        "CheckpointConfig": _checkpoints(job),
        "ExperimentConfig": _experiment(job),
        "ProfilerConfig": {"DisableProfiler": True},
        "RemoteDebugConfig": _switch("EnableRemoteDebug", job.container.remote_debug),
        "InfraCheckConfig": _switch("EnableInfraCheck", job.compute.infra_check),
        "RetryStrategy": {"MaximumRetryAttempts": job.compute.retries} if job.compute.retries else {},
    }
    return TrainingRequest({name: value for name, value in body.items() if value not in ({}, [], False)})


def _secrets(job: JobConfig) -> dict[str, str]:
    """Say where the container finds the secrets; their values are not known here."""
    if not job.secrets:
        return {}
    places = {name: secret.model_dump(include={"entry", "key"}) for name, secret in job.secrets.items()}
    return {SECRETS: json.dumps(places)}


def _token(job: JobConfig, context: SubmitContext) -> dict[str, str]:
    """Say where the container finds the token: whoever may describe the job reads hyperparameters and variables."""
    if context.token is None:
        return {}
    return {TOKEN_FILE: json.dumps(_TOKEN_IN_CONTAINER if job.network.isolation else context.token)}


def _algorithm(job: JobConfig) -> dict[str, Any]:
    spec: dict[str, Any] = {"TrainingInputMode": job.input_mode, "TrainingImage": job.image}
    if job.container.entry_point:
        spec["ContainerEntrypoint"] = list(job.container.entry_point)
    if job.container.arguments:
        spec["ContainerArguments"] = list(job.container.arguments)
    if job.container.registry_access is not None:
        spec["TrainingImageConfig"] = _registry(job)
    if job.metrics:
        spec["MetricDefinitions"] = [{"Name": name, "Regex": regex} for name, regex in job.metrics.items()]
    return spec


def _registry(job: JobConfig) -> dict[str, Any]:
    credentials = job.container.registry_credentials
    given = {"TrainingRepositoryCredentialsProviderArn": credentials}
    return {
        "TrainingRepositoryAccessMode": job.container.registry_access,
        **({"TrainingRepositoryAuthConfig": given} if credentials is not None else {}),
    }


def _experiment(job: JobConfig) -> dict[str, Any]:
    names = {
        "ExperimentName": job.experiment.name,
        "TrialName": job.experiment.trial,
        "TrialComponentDisplayName": job.experiment.display_name,
        "RunName": job.experiment.run,
    }
    return {name: value for name, value in names.items() if value is not None}


def _output(job: JobConfig, context: SubmitContext) -> dict[str, Any]:
    return {
        "S3OutputPath": context.output,
        **({"KmsKeyId": job.encryption.output_key} if job.encryption.output_key else {}),
        **({} if job.compress_output else {"CompressionType": "NONE"}),
    }


def _stopping(job: JobConfig) -> dict[str, Any]:
    longest = job.compute.max_run_seconds
    waiting = job.compute.max_wait_seconds or longest
    return {"MaxRuntimeInSeconds": longest, **({"MaxWaitTimeInSeconds": waiting} if job.compute.spot else {})}


def _resources(job: JobConfig) -> dict[str, Any]:
    optional = {
        "VolumeKmsKeyId": job.encryption.volume_key,
        "KeepAlivePeriodInSeconds": job.compute.keep_alive_seconds,
        "TrainingPlanArn": job.compute.training_plan,
    }
    machines: dict[str, Any] = {
        "InstanceCount": job.compute.instance_count,
        "InstanceType": job.compute.instance_type,
    }
    if job.compute.instance_groups:
        machines = {"InstanceGroups": [_group(group) for group in job.compute.instance_groups]}
    return {
        "VolumeSizeInGB": job.compute.volume_gb,
        **machines,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _group(group: InstanceGroup) -> dict[str, Any]:
    return {
        "InstanceGroupName": group.name,
        "InstanceType": group.instance_type,
        "InstanceCount": group.instance_count,
    }


def _channels(job: JobConfig, context: SubmitContext) -> list[dict[str, Any]]:
    channels = [_channel(name, channel) for name, channel in job.inputs.items()]
    if job.network.isolation:
        channels.append(_channel(CODE_CHANNEL, Channel(uri=context.source)))
        if context.token is not None:
            channels.append(_channel(TOKEN_CHANNEL, Channel(uri=context.token)))
    return channels


def _channel(name: str, channel: Channel) -> dict[str, Any]:
    if channel.file_system is not None:
        return {"ChannelName": name, "DataSource": _mounted(channel.file_system), **dict(_channel_options(channel))}
    source: dict[str, Any] = {
        "S3DataType": channel.data_type,
        "S3Uri": channel.uri,
        "S3DataDistributionType": "ShardedByS3Key" if channel.sharded else "FullyReplicated",
    }
    if channel.attribute_names:
        source["AttributeNames"] = list(channel.attribute_names)
    if channel.instance_groups:
        source["InstanceGroupNames"] = list(channel.instance_groups)
    if channel.accept_eula is not None:
        source["ModelAccessConfig"] = {"AcceptEula": channel.accept_eula}
    if channel.hub_content is not None:
        source["HubAccessConfig"] = {"HubContentArn": channel.hub_content}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, **dict(_channel_options(channel))}


def _mounted(system: FileSystem) -> dict[str, Any]:
    return {
        "FileSystemDataSource": {
            "FileSystemId": system.id,
            "FileSystemType": system.type,
            "DirectoryPath": system.path,
            "FileSystemAccessMode": system.access,
        }
    }


def _channel_options(channel: Channel) -> Iterator[tuple[str, Any]]:
    if channel.compression is not None:
        yield "CompressionType", channel.compression
    if channel.content_type is not None:
        yield "ContentType", channel.content_type
    if channel.record_wrapping is not None:
        yield "RecordWrapperType", channel.record_wrapping
    if channel.mode is not None:
        yield "InputMode", channel.mode
    if channel.shuffle_seed is not None:
        yield "ShuffleConfig", {"Seed": channel.shuffle_seed}


def _checkpoints(job: JobConfig) -> dict[str, Any]:
    kept = job.checkpoints
    if kept is None:
        return {}
    return {"S3Uri": kept.uri, **({"LocalPath": kept.local_path} if "local_path" in kept.model_fields_set else {})}


def _vpc(job: JobConfig) -> dict[str, Any]:
    if not job.network.subnets:
        return {}
    return {"Subnets": list(job.network.subnets), "SecurityGroupIds": list(job.network.security_groups)}


def _switch(name: str, value: bool | None) -> dict[str, Any]:
    return {} if value is None else {name: value}
