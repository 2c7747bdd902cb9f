"""The inputs of `fit`: what SDK v2 takes there, as channels of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smpkit.config.explain import validated
from smpkit.config.job import Channel
from smpkit.errors import ConfigError, Problem

__all__ = ["TrainingInput", "channels"]

_DEFAULT_CHANNEL = "training"


def TrainingInput(  # noqa: N802  SDK v2's name
    s3_data: str,
    distribution: str | None = None,
    compression: str | None = None,
    content_type: str | None = None,
    record_wrapping: str | None = None,
    s3_data_type: str = "S3Prefix",
    input_mode: str | None = None,
    attribute_names: list[str] | None = None,
    shuffle_seed: int | None = None,
) -> Channel:
    """Describe one input as SDK v2's class of this name does.

    Raises:
        ConfigError: with all problems.
    """
    source: dict[str, Any] = {"S3Uri": s3_data, "S3DataType": s3_data_type}
    source |= {"S3DataDistributionType": distribution} if distribution else {}
    source |= {"AttributeNames": attribute_names} if attribute_names else {}
    options = {
        "CompressionType": compression,
        "ContentType": content_type,
        "RecordWrapperType": record_wrapping,
        "InputMode": input_mode,
        "ShuffleConfig": {"Seed": shuffle_seed} if shuffle_seed is not None else None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return _channel("TrainingInput", {"DataSource": {"S3DataSource": source}, **given})


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


def _channel(name: str, config: Mapping[str, Any]) -> Channel:
    """Make a channel of its form in a request, which is what SDK v2's inputs hold."""
    source = config.get("DataSource", {}).get("S3DataSource")
    if source is None:
        message = "is a file system, which smpkit does not mount"
        raise ConfigError([Problem((name,), message, "put the data in S3")], subject="inputs")
    data = {
        "uri": source.get("S3Uri"),
        "sharded": source.get("S3DataDistributionType") == "ShardedByS3Key",
        "data_type": source.get("S3DataType"),
        "attribute_names": source.get("AttributeNames"),
        "compression": config.get("CompressionType"),
        "content_type": config.get("ContentType"),
        "record_wrapping": config.get("RecordWrapperType"),
        "mode": config.get("InputMode"),
        "shuffle_seed": config.get("ShuffleConfig", {}).get("Seed"),
    }
    given = {key: value for key, value in data.items() if value is not None}
    return validated(Channel, given, subject=f"input `{name}`")
