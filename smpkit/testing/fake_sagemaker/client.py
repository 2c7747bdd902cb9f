"""What all clients of the fake share: requests and answers checked against botocore's model, and errors on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from botocore.exceptions import ClientError, ParamValidationError
from botocore.model import Shape
from botocore.validate import ParamValidator

from smpkit_estimator.sagemaker import operation_name, request_shape, response_shape

__all__ = ["FakeClient", "Faults", "Handler", "client_error", "validate"]

Handler = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class _Fault:
    error: Exception
    times: int
    after: int
    late: bool


@dataclass
class Faults:
    """Errors that calls will meet, by the name of the method.

    ::

        fake.faults.add("describe_training_job", "ThrottlingException", "Rate exceeded", times=3)
        fake.faults.raises("get_log_events", EndpointConnectionError(endpoint_url="https://..."))
    """

    calls: dict[str, int] = field(default_factory=dict)
    """How often each method was called."""
    _waiting: dict[str, list[_Fault]] = field(default_factory=dict)

    def add(
        self, method: str, code: str, message: str, *, times: int = 1, after: int = 0, late: bool = False,
        status: int = 400,
    ) -> None:  # fmt: skip
        """Let `method` be refused `times` times with an HTTP status, after `after` more calls that are not."""
        operation = "".join(part.title() for part in method.split("_"))
        self.raises(method, client_error(code, message, operation, status), times=times, after=after, late=late)

    def raises(self, method: str, error: Exception, *, times: int = 1, after: int = 0, late: bool = False) -> None:
        """Let `method` raise `error`; with `late`, after the call has taken effect: its answer is lost."""
        self._waiting.setdefault(method, []).append(_Fault(error, times, after, late))

    def meet(self, method: str) -> None:
        """Count a call, and raise the error that waits for it."""
        self.calls[method] = self.calls.get(method, 0) + 1
        self._raise(method, late=False)

    def lose(self, method: str) -> None:
        """Raise the error that waits for the answer of a call that has taken effect."""
        self._raise(method, late=True)

    def _raise(self, method: str, *, late: bool) -> None:
        for fault in self._waiting.get(method, []):
            if fault.late != late:
                continue
            if fault.after > 0:
                fault.after -= 1
            elif fault.times > 0:
                fault.times -= 1
                raise fault.error


class FakeClient:
    """A client of one service; its methods are those of a boto3 client that have a handler here."""

    def __init__(self, service: str, faults: Faults, handlers: Mapping[str, Handler]) -> None:
        self._service = service
        self._faults = faults
        self._handlers = handlers

    def __getattr__(self, method: str) -> Callable[..., dict[str, Any]]:
        operation = operation_name(self._service, method)
        if method not in self._handlers:
            raise NotImplementedError(f"the fake has no {self._service}.{method}")

        def call(**request: Any) -> dict[str, Any]:
            validate(request, request_shape(self._service, operation))
            self._faults.meet(method)
            answer = self._handlers[method](request)
            shape = response_shape(self._service, operation)
            if shape is not None:
                validate({name: value for name, value in answer.items() if name != "Body"}, shape)  # a stream
            self._faults.lose(method)
            return answer

        return call

    def upload_fileobj(self, content: BinaryIO, bucket: str, key: str, ExtraArgs: Any = None) -> None:  # noqa: N803
        """As boto3 adds it to the client of S3."""
        self.put_object(Bucket=bucket, Key=key, Body=content.read(), **(ExtraArgs or {}))

    def download_fileobj(self, bucket: str, key: str, into: BinaryIO) -> None:
        """As boto3 adds it to the client of S3."""
        into.write(self.get_object(Bucket=bucket, Key=key)["Body"].read())


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
