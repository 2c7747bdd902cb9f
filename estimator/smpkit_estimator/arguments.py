"""The arguments of SageMaker's SDK v2 estimators, and the inputs of `fit`, read into a job; why some have no place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from smpkit.config.distribution import INSTANCE_GROUPS
from smpkit.config.job import Channel, Experiment, JobConfig
from smpkit.config.section import validated
from smpkit.config.words import suggestion
from smpkit.errors import ConfigError, Problem
from smpkit_estimator.fields import ARGUMENTS, EXPERIMENT, put, read_channel

_SUBJECT = "arguments of Estimator"
_DEFAULT_CHANNEL = "training"

_OFF_ANYWAY: Mapping[str, tuple[object, ...]] = {
    "debugger_hook_config": (False, None),
    "disable_profiler": (True, None),
    "rules": (None, []),
    "profiler_config": (None,),
    "tensorboard_output_config": (None,),
}
"""Arguments of AWS's debugger and profiler, which live in AWS's own images: accepted where they switch them off."""

_VERSIONS = ("framework_version", "py_version", "pytorch_version", "transformers_version")
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_VERSIONS, "give `image_uri`: smpkit chooses no image for you"),
    "git_config": "clone the repository, and give `source_dir`",
    "model_uri": "make it a channel: `fit({'model': uri})`",
    "model_channel_name": "make it a channel: `fit({'model': uri})`",
    "compiler_config": "SageMaker's training compiler has ended",
    "instance_placement_config": "placement is left to SageMaker",
    "enable_sagemaker_metrics": "use `metric_definitions`",
    "enable_session_tag_chaining": "set tags with `tags`",
    "instance_groups": INSTANCE_GROUPS[1],
    "live_output": "write to `checkpoint_s3_uri`, which SageMaker uploads while the job runs",
}


def job_from_arguments(
    arguments: Mapping[str, Any], distribution: Any = None, mpi_options: Mapping[str, Any] | None = None
) -> JobConfig:
    """Make a job of SDK v2's arguments, of which None was not given; tell problems under the names of arguments."""
    known = {name: value for name, value in arguments.items() if value is not None}
    problems = list(_unknown(known))
    if mpi_options is not None and isinstance(distribution, Mapping) and "mpi" in distribution:
        problems.append(Problem(("mpi_options",), "is given twice: `distribution` has `mpi` too", "keep one of them"))
    data: dict[str, Any] = {}
    for name, value in known.items():
        if name in ARGUMENTS:
            put(data, ARGUMENTS[name].job, ARGUMENTS[name].read(value))
    put(data, "distribution", _distribution(distribution, mpi_options))
    try:
        job = validated(JobConfig, data, subject="arguments")
    except ConfigError as error:
        raise ConfigError([*map(as_argument, error.problems), *problems], subject=_SUBJECT) from None
    if problems:
        raise ConfigError(problems, subject=_SUBJECT)
    return job


def _unknown(arguments: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in arguments.items():
        if name in _REFUSED:
            reason = INSTANCE_GROUPS[0] if name == "instance_groups" else "has no meaning here"
            yield Problem((name,), reason, _REFUSED[name])
        elif name in _OFF_ANYWAY:
            if value not in _OFF_ANYWAY[name]:
                hint = "AWS's debugger and profiler are part of AWS's own images"
                yield Problem((name,), "can only be switched off", hint)
        elif name not in ARGUMENTS:
            yield Problem((name,), "unknown argument", suggestion(name, ARGUMENTS))


def _distribution(distribution: Any, mpi_options: Mapping[str, Any] | None) -> Any:
    if mpi_options is None or not (distribution is None or isinstance(distribution, Mapping)):
        return distribution
    return {**(distribution or {}), "mpi": mpi_options}


def as_argument(problem: Problem) -> Problem:
    """Name the argument, where the job file has another name or place for it."""
    for name, field in ARGUMENTS.items():
        place = tuple(field.job.split("."))
        if problem.path[: len(place)] == place:
            return replace(problem, path=(name, *problem.path[len(place) :]))
    return problem


def experiment_from(config: Mapping[str, str]) -> Experiment:
    """Read SDK v2's `experiment_config`."""
    subject = "experiment_config"
    unknown = [name for name in config if name not in EXPERIMENT]
    if unknown:
        problems = [Problem((name,), "unknown key", suggestion(name, EXPERIMENT)) for name in unknown]
        raise ConfigError(problems, subject=subject)
    return validated(Experiment, {EXPERIMENT[name]: value for name, value in config.items()}, subject=subject)


# ---- what SDK v2 takes as objects ------------------------------------------------------------------------------------


def TrainingInput(  # noqa: N802  SDK v2's name
    s3_data: str,
    distribution: str | None = None,
    compression: str | None = None,
    content_type: str | None = None,
    record_wrapping: str | None = None,
    s3_data_type: str = "S3Prefix",
    instance_groups: list[str] | None = None,
    input_mode: str | None = None,
    attribute_names: list[str] | None = None,
    target_attribute_name: str | None = None,
    shuffle_config: Any = None,
    hub_access_config: Mapping[str, Any] | None = None,
    model_access_config: Mapping[str, Any] | None = None,
) -> Channel:
    """Describe one input as SDK v2's class of this name does.

    Args:
        shuffle_config: SDK v2's `ShuffleConfig`, or `{"Seed": 1}`, or the seed alone.
        hub_access_config: `{"HubContentArn": ...}`.
        model_access_config: `{"AcceptEula": True}`.

    Raises:
        ConfigError: with all problems.
    """
    seed = getattr(shuffle_config, "seed", shuffle_config)
    source = {
        "S3Uri": s3_data,
        "S3DataType": s3_data_type,
        "S3DataDistributionType": distribution,
        "AttributeNames": attribute_names or None,
        "InstanceGroupNames": instance_groups or None,
        "HubAccessConfig": hub_access_config,
        "ModelAccessConfig": model_access_config,
    }
    config = {
        "DataSource": {"S3DataSource": source},
        "CompressionType": compression,
        "ContentType": content_type,
        "RecordWrapperType": record_wrapping,
        "InputMode": input_mode,
        "ShuffleConfig": {"Seed": seed} if isinstance(seed, int) else seed,
        "TargetAttributeName": target_attribute_name,
    }
    return _channel("TrainingInput", config)


def FileSystemInput(  # noqa: N802  SDK v2's name
    file_system_id: str,
    file_system_type: str,
    directory_path: str,
    file_system_access_mode: str = "ro",
    content_type: str | None = None,
) -> Channel:
    """Describe an input on FSx for Lustre or EFS as SDK v2's class of this name does.

    Raises:
        ConfigError: with all problems.
    """
    source = {
        "FileSystemId": file_system_id,
        "FileSystemType": file_system_type,
        "DirectoryPath": directory_path,
        "FileSystemAccessMode": file_system_access_mode,
    }
    config = {"DataSource": {"FileSystemDataSource": source}, "ContentType": content_type}
    return _channel("FileSystemInput", config)


def channels(inputs: object) -> dict[str, Channel]:
    """Return the channels that `fit(inputs)` means: one URI or input is the channel `training`."""
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        inputs = {_DEFAULT_CHANNEL: inputs}
    return {str(name): _input(str(name), value) for name, value in inputs.items()}


def _input(name: str, value: Any) -> Channel:
    if isinstance(value, Channel):
        return value
    if isinstance(value, str):
        return validated(Channel, {"uri": value}, subject=f"input `{name}`")
    config = getattr(value, "config", None)  # an input of SDK v2
    if isinstance(config, Mapping):
        return _channel(name, config)
    message = f"must be an S3 URI or a TrainingInput, got an object of type {type(value).__name__}"
    raise ConfigError([Problem((name,), message)], subject="inputs")


def _channel(name: str, config: Mapping[str, Any]) -> Channel:
    """Make a channel from its form in a request, which SDK v2's inputs hold; refuse what a channel lacks."""
    data, problems = read_channel(config)
    if problems:
        raise ConfigError([replace(problem, path=(name, *problem.path)) for problem in problems], subject="inputs")
    return validated(Channel, data, subject=f"input `{name}`")
