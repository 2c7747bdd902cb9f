"""What SDK v2 takes as objects: the inputs of `fit`, as channels of a job, and groups of instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from smpkit.config.explain import validated
from smpkit.config.job import Channel
from smpkit.config.job import InstanceGroup as Group
from smpkit.config.words import quoted
from smpkit.errors import ConfigError, Problem

__all__ = ["FileSystemInput", "InstanceGroup", "TrainingInput", "channels"]

_DEFAULT_CHANNEL = "training"


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
    source = {
        "S3Uri": s3_data,
        "S3DataType": s3_data_type,
        "S3DataDistributionType": distribution,
        "AttributeNames": attribute_names,
        "InstanceGroupNames": instance_groups,
        "HubAccessConfig": hub_access_config,
        "ModelAccessConfig": model_access_config,
    }
    options = {
        "CompressionType": compression,
        "ContentType": content_type,
        "RecordWrapperType": record_wrapping,
        "InputMode": input_mode,
        "ShuffleConfig": _shuffle(shuffle_config),
        "TargetAttributeName": target_attribute_name,
    }
    return _channel("TrainingInput", {"DataSource": {"S3DataSource": _given(source)}, **_given(options)})


def InstanceGroup(instance_group_name: str, instance_type: str, instance_count: int) -> Group:  # noqa: N802
    """Describe hosts of one kind as SDK v2's class of this name does.

    Raises:
        ConfigError: with all problems.
    """
    data = {"name": instance_group_name, "instance_type": instance_type, "instance_count": instance_count}
    return validated(Group, data, subject="InstanceGroup")


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
    options = _given({"ContentType": content_type})
    return _channel("FileSystemInput", {"DataSource": {"FileSystemDataSource": source}, **options})


def _shuffle(config: Any) -> Any:
    seed = getattr(config, "seed", config)
    return {"Seed": seed} if isinstance(seed, int) else seed


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, [])}


def channels(inputs: object) -> dict[str, Channel]:
    """Return the channels that `fit(inputs)` means: one URI or input is the channel `training`.

    Raises:
        ConfigError: an input is not one, or not in S3.
    """
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        inputs = {_DEFAULT_CHANNEL: inputs}
    return {str(name): _one(str(name), value) for name, value in inputs.items()}


def _one(name: str, value: Any) -> Channel:
    if isinstance(value, Channel):
        return value
    if isinstance(value, str):
        return validated(Channel, {"uri": value}, subject=f"input `{name}`")
    config = getattr(value, "config", None)  # an input of SDK v2
    if isinstance(config, Mapping):
        return _channel(name, config)
    message = f"must be an S3 URI or a TrainingInput, got an object of type {type(value).__name__}"
    raise ConfigError([Problem((name,), message)], subject="inputs")


_PLACES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("DataSource", "S3DataSource", "S3Uri"): ("uri",),
    ("DataSource", "S3DataSource", "S3DataType"): ("data_type",),
    ("DataSource", "S3DataSource", "AttributeNames"): ("attribute_names",),
    ("DataSource", "S3DataSource", "InstanceGroupNames"): ("instance_groups",),
    ("DataSource", "S3DataSource", "ModelAccessConfig", "AcceptEula"): ("accept_eula",),
    ("DataSource", "S3DataSource", "HubAccessConfig", "HubContentArn"): ("hub_content",),
    ("DataSource", "FileSystemDataSource", "FileSystemId"): ("file_system", "id"),
    ("DataSource", "FileSystemDataSource", "FileSystemType"): ("file_system", "type"),
    ("DataSource", "FileSystemDataSource", "DirectoryPath"): ("file_system", "path"),
    ("DataSource", "FileSystemDataSource", "FileSystemAccessMode"): ("file_system", "access"),
    ("CompressionType",): ("compression",),
    ("ContentType",): ("content_type",),
    ("RecordWrapperType",): ("record_wrapping",),
    ("InputMode",): ("mode",),
    ("ShuffleConfig", "Seed"): ("shuffle_seed",),
}
"""Place in a request -> place in a channel."""

_SHARDED = ("DataSource", "S3DataSource", "S3DataDistributionType")


def _channel(name: str, config: Mapping[str, Any]) -> Channel:
    """Make a channel from its form in a request, which SDK v2's inputs hold; refuse fields that a channel lacks."""
    data: dict[str, Any] = {}
    problems: list[Problem] = []
    for path, value in _leaves(config, ()):
        if path == _SHARDED and value in ("ShardedByS3Key", "FullyReplicated"):
            data["sharded"] = value == "ShardedByS3Key"
        elif path in _PLACES:
            *outer, last = _PLACES[path]
            target = data
            for part in outer:
                target = target.setdefault(part, {})
            target[last] = value
        else:
            hint = "remove it: no channel of a training job has it here, so it would be lost"
            problems.append(Problem((name, path[-1]), f"cannot be sent, got {quoted(value)}", hint))
    if problems:
        raise ConfigError(problems, subject="inputs")
    return validated(Channel, data, subject=f"input `{name}`")


def _leaves(value: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, (*path, name))
        elif item is not None:
            yield (*path, name), item
