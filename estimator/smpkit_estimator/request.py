"""Build the request of a managed training job: a pure function from the job file to what `CreateTrainingJob` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from smpkit.config.confidential import masked
from smpkit.config.job import Channel, JobConfig
from smpkit.config.wire import CHANNELS, CODE_CHANNEL, SECRETS, TOKEN_CHANNEL, TOKEN_FILE, TOKEN_NAME
from smpkit_estimator.fields import channel_of, request_of
from smpkit_estimator.hyperparameters import hyperparameters
from smpkit_estimator.status import machines_of

__all__ = ["SubmitContext", "TrainingRequest", "build_request"]


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
        text: str = yaml.safe_dump(self.shown(), sort_keys=False, allow_unicode=True, width=120)
        return text

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
    inputs = dict(job.inputs)
    source, token = context.source, context.token
    if job.network.isolation:
        # The container cannot reach S3, so the platform brings what it would download.
        inputs[CODE_CHANNEL] = Channel(uri=source)
        source = f"{CHANNELS}/{CODE_CHANNEL}/sourcedir.tar.gz"
        if token is not None:
            inputs[TOKEN_CHANNEL] = Channel(uri=token)
            token = f"{CHANNELS}/{TOKEN_CHANNEL}/{TOKEN_NAME}"
    sent = hyperparameters(job, submit_directory=source, job_name=context.job_name, region=context.region)
    if job.secrets:  # where the container finds them; their values are not known here
        places = {name: secret.model_dump(include={"entry", "key"}) for name, secret in job.secrets.items()}
        sent[SECRETS] = json.dumps(places)
    if token is not None:  # where it is: whoever may describe the job reads hyperparameters and variables
        sent[TOKEN_FILE] = json.dumps(token)
    body = {
        "TrainingJobName": context.job_name,
        "RoleArn": context.role,
        "HyperParameters": sent,
        **request_of(job),
        "ProfilerConfig": {"DisableProfiler": True},
    }
    body["OutputDataConfig"] = {"S3OutputPath": context.output, **body.get("OutputDataConfig", {})}
    if inputs:
        body["InputDataConfig"] = [channel_of(name, channel) for name, channel in inputs.items()]
    if job.compute.spot:
        stopping = body["StoppingCondition"]
        stopping.setdefault("MaxWaitTimeInSeconds", stopping["MaxRuntimeInSeconds"])
    return TrainingRequest(body)
