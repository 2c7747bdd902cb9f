"""The services' own description of their requests, as botocore ships it: shapes, required fields, limits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError, ParamValidationError
from botocore.loaders import Loader
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator

__all__ = [
    "ClientError",
    "ParamValidationError",
    "client_error",
    "operation_name",
    "request_shape",
    "response_shape",
    "validate",
]


@cache
def _service(name: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


def request_shape(service: str, operation: str) -> Shape:
    """Return the shape of a request, such as `("sagemaker", "CreateTrainingJob")`."""
    return _service(service).operation_model(operation).input_shape


def response_shape(service: str, operation: str) -> Shape | None:
    """Return the shape of a response; None if it has no body."""
    return _service(service).operation_model(operation).output_shape


def validate(value: Mapping[str, Any], shape: Shape) -> None:
    """Check types, required fields and minimums as a boto3 client does before it sends.

    Raises:
        ParamValidationError: of botocore, with a report.
    """
    report = ParamValidator().validate(value, shape)
    if report.has_errors():
        raise ParamValidationError(report=report.generate_report())


def client_error(code: str, message: str, operation: str, status: int = 400) -> ClientError:
    """Return the error that a boto3 client raises when the service refuses."""
    answer: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "RequestId": "fake", "RetryAttempts": 0},
    }
    return ClientError(answer, operation)


@cache
def operation_name(service: str, method: str) -> str:
    """Return the operation behind a boto3 client's method: `create_training_job` -> `CreateTrainingJob`.

    Raises:
        AttributeError: the service has no such operation.
    """
    for name in _service(service).operation_names:
        if xform_name(name) == method:
            return str(name)
    raise AttributeError(f"{service} has no operation {method!r}")
