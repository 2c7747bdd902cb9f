"""Turn the description of a job into the request of its successor, which starts from the same checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from smpkit.errors import UsageError
from smpkit_estimator.backend import base_name, unique_name
from smpkit_estimator.request import TrainingRequest
from smpkit_estimator.sagemaker import request_shape

__all__ = ["RESUMED_FROM", "resumed_request"]

RESUMED_FROM = "smpkit:resumed-from"
"""Tag of a job that goes on from another: its name."""


def resumed_request(
    description: Mapping[str, Any],
    tags: Mapping[str, str],
    job_name: str | None,
    now: datetime,
    changes: Mapping[str, Any],
) -> TrainingRequest:
    """Return the request of a job like the described one: the same sources, image, data and checkpoints.

    Args:
        tags: of the described job.
        changes: parts of `ResourceConfig` and `StoppingCondition` that are to be different.

    Raises:
        UsageError: another type or number of instances is asked for, and the job has instance groups.
    """
    shape = request_shape("sagemaker", "CreateTrainingJob")
    old = description["TrainingJobName"]
    name = job_name or unique_name(base_name(old), now)
    body = _known(description, shape)
    body["TrainingJobName"] = name
    body["HyperParameters"] = {**body.get("HyperParameters", {}), "sagemaker_job_name": json.dumps(name)}
    if body.get("ResourceConfig", {}).get("InstanceGroups"):
        for key, option in (("InstanceCount", "--instance-count"), ("InstanceType", "--instance-type")):
            if key in changes:
                message = f"`{option}` is for a job whose hosts are of one kind, and `{old}` has instance groups"
                raise UsageError(message, hint="submit the job file with other groups and the same `checkpoints`")
    kept = {key: value for key, value in tags.items() if not key.startswith("aws:")}
    body["Tags"] = [{"Key": key, "Value": value} for key, value in {**kept, RESUMED_FROM: old}.items()]
    for part in ("ResourceConfig", "StoppingCondition"):
        known = request_shape("sagemaker", "CreateTrainingJob").members[part].members
        body[part] = {**body.get(part, {}), **{key: value for key, value in changes.items() if key in known}}
    return TrainingRequest(body)


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
