"""The arguments of SageMaker's SDK v2 estimators, by name: where each belongs in a job, and why some have no place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from smpkit.config.explain import validated
from smpkit.config.job import Experiment, JobConfig
from smpkit.config.section import KeyPath
from smpkit.config.words import suggestion
from smpkit.errors import ConfigError, Problem

__all__ = ["PLACES", "experiment_from", "job_from_arguments"]

PLACES: Mapping[str, KeyPath] = {
    "entry_point": ("entry_point",),
    "source_dir": ("source_dir",),
    "dependencies": ("dependencies",),
    "base_job_name": ("name",),
    "hyperparameters": ("hyperparameters",),
    "environment": ("environment",),
    "secrets": ("secrets",),
    "distribution": ("distribution",),
    "instance_type": ("compute", "instance_type"),
    "instance_count": ("compute", "instance_count"),
    "instance_groups": ("compute", "instance_groups"),
    "volume_size": ("compute", "volume_gb"),
    "use_spot_instances": ("compute", "spot"),
    "max_run": ("compute", "max_run_seconds"),
    "max_wait": ("compute", "max_wait_seconds"),
    "keep_alive_period_in_seconds": ("compute", "keep_alive_seconds"),
    "max_retry_attempts": ("compute", "retries"),
    "training_plan": ("compute", "training_plan"),
    "enable_infra_check": ("compute", "infra_check"),
    "image_uri": ("image",),
    "role": ("role",),
    "input_mode": ("input_mode",),
    "output_path": ("output",),
    "code_location": ("code_location",),
    "checkpoint_s3_uri": ("checkpoints", "uri"),
    "checkpoint_local_path": ("checkpoints", "local_path"),
    "tags": ("tags",),
    "metric_definitions": ("metrics",),
    "subnets": ("network", "subnets"),
    "security_group_ids": ("network", "security_groups"),
    "enable_network_isolation": ("network", "isolation"),
    "encrypt_inter_container_traffic": ("network", "encrypt_traffic"),
    "output_kms_key": ("encryption", "output_key"),
    "volume_kms_key": ("encryption", "volume_key"),
    "container_entry_point": ("container", "entry_point"),
    "container_arguments": ("container", "arguments"),
    "container_log_level": ("container", "log_level"),
    "training_repository_access_mode": ("container", "registry_access"),
    "training_repository_credentials_provider_arn": ("container", "registry_credentials"),
    "enable_remote_debug": ("container", "remote_debug"),
    "disable_output_compression": ("compress_output",),
}
"""Argument of SDK v2 -> place in the job file."""

_OFF_ANYWAY: Mapping[str, tuple[object, ...]] = {
    "debugger_hook_config": (False, None),
    "disable_profiler": (True, None),
    "rules": (None, []),
    "profiler_config": (None,),
    "tensorboard_output_config": (None,),
}
"""Arguments of AWS's debugger and profiler, which live in AWS's own images: accepted where they switch them off."""

_REFUSED: Mapping[str, str] = {
    "framework_version": "give `image_uri`: smpkit chooses no image for you",
    "py_version": "give `image_uri`: smpkit chooses no image for you",
    "git_config": "clone the repository, and give `source_dir`",
    "model_uri": "make it a channel: `fit({'model': uri})`",
    "model_channel_name": "make it a channel: `fit({'model': uri})`",
    "compiler_config": "SageMaker's training compiler has ended",
    "instance_placement_config": "placement is left to SageMaker",
    "enable_sagemaker_metrics": "use `metric_definitions`",
    "enable_session_tag_chaining": "set tags with `tags`",
}


def job_from_arguments(
    arguments: Mapping[str, Any], distribution: Any = None, mpi_options: Mapping[str, Any] | None = None
) -> JobConfig:
    """Make a job of SDK v2's arguments; None means that an argument was not given.

    Raises:
        ConfigError: with all problems, each under the name of its argument.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    problems = list(_unknown(given))
    if mpi_options is not None and isinstance(distribution, Mapping) and "mpi" in distribution:
        problems.append(Problem(("mpi_options",), "is given twice: `distribution` has `mpi` too", "keep one of them"))
    data: dict[str, Any] = {}
    for name, value in given.items():
        if name in PLACES:
            _put(data, PLACES[name], _CONVERTED.get(name, _as_it_is)(value))
    if distribution is not None:
        _put(data, ("distribution",), _with_mpi(_with_group_names(distribution), mpi_options))
    elif mpi_options is not None:
        _put(data, ("distribution",), {"mpi": mpi_options})
    try:
        job = validated(JobConfig, data, subject="arguments")
    except ConfigError as error:
        raise ConfigError([*map(_as_argument, error.problems), *problems], subject="arguments of Estimator") from None
    if problems:
        raise ConfigError(problems, subject="arguments of Estimator")
    return job


_EXPERIMENT: Mapping[str, str] = {
    "ExperimentName": "name",
    "TrialName": "trial",
    "TrialComponentDisplayName": "display_name",
    "RunName": "run",
}


def experiment_from(config: Mapping[str, str]) -> Experiment:
    """Read SDK v2's `experiment_config`.

    Raises:
        ConfigError: with all problems.
    """
    unknown = [name for name in config if name not in _EXPERIMENT]
    if unknown:
        problems = [Problem((name,), "unknown key", suggestion(name, _EXPERIMENT)) for name in unknown]
        raise ConfigError(problems, subject="experiment_config")
    return validated(
        Experiment, {_EXPERIMENT[name]: value for name, value in config.items()}, subject="experiment_config"
    )


def _with_mpi(distribution: Any, mpi_options: Mapping[str, Any] | None) -> Any:
    if mpi_options is None or not isinstance(distribution, Mapping):
        return distribution
    return {**distribution, "mpi": mpi_options}


def _unknown(given: Mapping[str, Any]) -> Iterable[Problem]:
    for name, value in given.items():
        if name in _REFUSED:
            yield Problem((name,), "has no meaning here", _REFUSED[name])
        elif name in _OFF_ANYWAY:
            if value not in _OFF_ANYWAY[name]:
                hint = "AWS's debugger and profiler are part of AWS's own images"
                yield Problem((name,), "can only be switched off", hint)
        elif name not in PLACES:
            yield Problem((name,), "unknown argument", suggestion(name, PLACES))


def _put(data: dict[str, Any], place: KeyPath, value: Any) -> None:
    for part in place[:-1]:
        data = data.setdefault(str(part), {})
    data[str(place[-1])] = value


def _as_argument(problem: Problem) -> Problem:
    """Name the argument, where the job file has another name or place for it."""
    for name, place in PLACES.items():
        if problem.path[: len(place)] == place:
            return replace(problem, path=(name, *problem.path[len(place) :]))
    return problem


def _as_it_is(value: Any) -> Any:
    return value


def _path(value: Any) -> Any:
    return str(value) if isinstance(value, PurePath) else value


def _lists(value: Any) -> Any:
    """Make lists of tuples, as JSON does."""
    if isinstance(value, Mapping):
        return {name: _lists(item) for name, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _with_group_names(distribution: Any) -> Any:
    """Put names in place of SDK v2's `InstanceGroup` objects in a distribution."""
    if not isinstance(distribution, Mapping) or not isinstance(distribution.get("instance_groups"), (list, tuple)):
        return distribution
    names = [_name_of(group) for group in distribution["instance_groups"]]
    return {**distribution, "instance_groups": names}


def _name_of(group: Any) -> Any:
    made = _group(group)
    return made.get("name", group) if isinstance(made, Mapping) else getattr(made, "name", made)


def _groups(value: Any) -> Any:
    return [_group(group) for group in value] if isinstance(value, (list, tuple)) else value


def _group(value: Any) -> Any:
    """Read one of SDK v2's `InstanceGroup` objects; leave everything else to validation."""
    if not hasattr(value, "instance_group_name"):
        return value
    return {
        "name": value.instance_group_name,
        "instance_type": value.instance_type,
        "instance_count": value.instance_count,
    }


def _pairs(key: str, item: str) -> Any:
    """Make a converter of SageMaker's lists of pairs into a mapping; what is no such list is left to validation."""

    def convert(value: Any) -> Any:
        if not isinstance(value, list) or not all(
            isinstance(pair, Mapping) and {key, item} <= set(pair) for pair in value
        ):
            return value
        return {pair[key]: pair[item] for pair in value}

    return convert


_CONVERTED: Mapping[str, Any] = {
    "entry_point": _path,
    "source_dir": _path,
    "dependencies": lambda value: [_path(item) for item in value] if isinstance(value, (list, tuple)) else value,
    "instance_groups": _groups,
    "tags": _pairs("Key", "Value"),
    "hyperparameters": _lists,
    "metric_definitions": _pairs("Name", "Regex"),
    "disable_output_compression": lambda value: not value if isinstance(value, bool) else value,
}
