"""From a job file to the requests of AWS Batch and the files in S3, decided and checked first."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.config.explain import validated
from smpkit.config.fields import JOB_NAME
from smpkit.config.job import JobConfig
from smpkit.config.wire import REGION, SECRETS, TOKEN_FILE
from smpkit.config.words import quoted
from smpkit.errors import ConfigError, Problem
from smpkit_estimator.aws import request_shape
from smpkit_estimator.batch.requests import BatchFacts, definition, submission
from smpkit_estimator.described import (
    described_job,
    first_of_each,
    job_to_keep,
    not_for_schedulers,
    place_problems,
    shown_spec,
    unused_settings,
    world_problems,
)
from smpkit_estimator.limits import preflight
from smpkit_estimator.sources import Packed, Sources, job_sources, pack, packing_notes

__all__ = ["BatchPlan", "plan_job", "plan_resumed"]


@dataclass(frozen=True)
class BatchPlan:
    """All that will be sent, decided and checked; nothing was uploaded or started."""

    facts: BatchFacts
    spec: Mapping[str, Any]
    """What hosts read."""
    archive_uri: str
    sources: Sources | None
    """What is packed; None if the archive is in S3 already."""
    packed: Packed | None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The job's name."""
        return self.facts.name

    @property
    def job_names(self) -> tuple[str]:
        """The one job that it starts."""
        return (self.name,)

    @property
    def machines(self) -> str:
        """On what, in words."""
        count, options = self.facts.job.compute.num_hosts, self.facts.options
        kind = f" of {options.instance_type}" if options.instance_type else ""
        return f"{count} node{'s' * (count != 1)}{kind} of the queue {options.queue}"

    @property
    def max_seconds(self) -> int | None:
        """How long the job may run; None for ever."""
        limit = definition(self.facts).get("timeout")
        return None if limit is None else int(limit["attemptDurationSeconds"])

    def kept(self) -> dict[str, Any]:
        """The job file, and where the sources are, for `smpkit resume`."""
        return {"job": job_to_keep(self.facts.job), "sources": self.archive_uri}

    def shown(self) -> dict[str, Any]:
        """The requests as they are sent, and what hosts read, without secrets."""
        return {
            "RegisterJobDefinition": definition(self.facts),
            "SubmitJob": submission(self.facts),
            f"{self.facts.place}/spec.json": shown_spec(self.spec),
        }

    def text(self) -> str:
        """The same as YAML."""
        import yaml

        text: str = yaml.safe_dump(self.shown(), sort_keys=False, allow_unicode=True, width=120)
        return text


def plan_job(
    job: JobConfig, folder: Path, name: str, now: datetime, region: str, *, script_only: bool = False
) -> BatchPlan:
    """Decide everything about a job on AWS Batch; relative paths start at `folder`.

    Raises:
        ConfigError: the job cannot be sent as it is; lists all problems.
    """
    problems = list(_not_for_batch(job, name))
    sources = job_sources(job, folder, problems, script_only=script_only)
    if problems:
        raise ConfigError(first_of_each(problems), subject="job for AWS Batch")
    packed = pack(sources) if sources is not None else None
    staging = _staging(job)
    archive = job.source_dir if packed is None else f"{staging}/{packed.digest}/sourcedir.tar.gz"
    notes = [*_notes(job), *(packing_notes(sources, packed) if sources is not None and packed is not None else ())]
    return _plan(job, name, now, region, archive, sources, packed, notes)


def plan_resumed(
    config: Mapping[str, Any], archive: str, name: str, now: datetime, region: str, changes: Mapping[str, Any]
) -> BatchPlan:
    """Plan a job like another one that goes on from its checkpoints: the same sources, image and settings.

    Args:
        config: the other job's file, as it was kept.
        archive: S3 URI of its sources.

    Raises:
        ConfigError: the changes do not fit the job.
    """
    kept = json.loads(json.dumps(config))
    compute = kept.setdefault("compute", {})
    if "InstanceCount" in changes:
        compute["instance_count"] = changes["InstanceCount"]
    if "MaxRuntimeInSeconds" in changes:
        compute["max_run_seconds"] = changes["MaxRuntimeInSeconds"]
    if "InstanceType" in changes:
        kept["backend"]["batch"]["instance_type"] = changes["InstanceType"]
    job = validated(JobConfig, kept, subject="job")
    problems = list(_not_for_batch(job, name))
    if problems:
        raise ConfigError(first_of_each(problems), subject="job for AWS Batch")
    return _plan(job, name, now, region, archive, None, None, list(_notes(job)))


def _plan(
    job: JobConfig,
    name: str,
    now: datetime,
    region: str,
    archive: str,
    sources: Sources | None,
    packed: Packed | None,
    notes: list[str],
) -> BatchPlan:
    # A new place each time, as names may be used again.
    facts = BatchFacts(name, job, region, f"{_staging(job)}/jobs/{name}-{secrets.token_hex(4)}")
    for operation, body in (("RegisterJobDefinition", definition(facts)), ("SubmitJob", submission(facts))):
        problems = preflight(body, request_shape("batch", operation))
        if problems:
            raise ConfigError(problems, subject=f"request of {operation}")
    return BatchPlan(facts, _spec(facts, now, archive), archive, sources, packed, tuple(notes))


def _spec(facts: BatchFacts, now: datetime, archive: str) -> dict[str, Any]:
    job, options = facts.job, facts.options
    spec = described_job(
        job,
        facts.name,
        now,
        archive,
        kind=options.instance_type or "batch",
        prefix="node",
        port=options.port,
        grace_seconds=options.grace_seconds,
    )
    sent = spec["hyperparameters"]
    sent[REGION] = json.dumps(facts.region)
    if job.compute.num_hosts > 1:
        sent[TOKEN_FILE] = json.dumps(f"{facts.place}/token")
    if job.secrets:
        places = {name: secret.model_dump(include={"entry", "key"}) for name, secret in job.secrets.items()}
        sent[SECRETS] = json.dumps(places)
    return spec


def _staging(job: JobConfig) -> str:
    return (job.backend.batch.staging or job.code_location or "").rstrip("/")


def _not_for_batch(job: JobConfig, name: str) -> Iterator[Problem]:
    options = job.backend.batch
    if re.fullmatch(JOB_NAME, name) is None:
        message = f"makes the name {quoted(name)}, and a name has 1 to 63 letters, digits and hyphens"
        yield Problem(("name",), message, "give a shorter one")
    if job.image is None:
        yield Problem(("image",), "is required on AWS Batch", "push an image with smpkit to ECR, and name it")
    if options.queue is None:
        yield Problem(("backend", "batch", "queue"), "is required", "`aws batch describe-job-queues` lists them")
    if not _staging(job):
        yield Problem(("backend", "batch", "staging"), "is required", "an S3 URI that you write to and the role reads")
    role = options.role or job.role
    if role is None or not role.startswith("arn:"):
        hint = "`arn:aws:iam::<account>:role/<name>`, which ECS tasks may take"
        yield Problem(("backend", "batch", "role"), "must be the ARN of the job's role", hint)
    for variable, secret in job.secrets.items():
        if secret.entry is None:
            hint = f"write `{variable}: <name or ARN of the entry>`"
            yield Problem(("secrets", variable), "names no entry in AWS Secrets Manager", hint)
    yield from not_for_schedulers(job, "AWS Batch")
    yield from place_problems(job, [volume.mount for volume in options.volumes], "backend.batch.volumes")
    yield from world_problems(job, job.compute.num_hosts)


def _notes(job: JobConfig) -> Iterator[str]:
    unused = unused_settings(job, "role", "tags", "code_location")
    if unused:
        yield f"not used on AWS Batch: {', '.join(f'`{name}`' for name in unused)}"
    if job.distribution.launcher == "mpirun":
        yield "the ranks are started with torchrun, not mpirun: the main node cannot start processes on the others"
    if job.output is None:
        yield "the model stays in the containers and goes with them: `output` names a folder in a volume"
    if job.checkpoints is None and job.backend.batch.retries > 1:
        yield "without `checkpoints` in a volume, a job that is tried again begins anew"
    limit = job.compute.max_run_seconds
    if "max_run_seconds" in job.compute.model_fields_set and limit < 60:
        yield f"the time limit is 60 s, not {limit}: Batch takes none below"
