"""From a job file to what is sent: sources, names and places decided and checked first, then uploaded and started."""

from __future__ import annotations

import io
import json
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.config.section import KeyPath
from smpkit.config.words import printable
from smpkit.errors import ConfigError, Problem
from smpkit_estimator.archive import Packed, fingerprint, pack
from smpkit_estimator.backend import unique_name
from smpkit_estimator.cloud import Cloud, DryCloud, split_uri
from smpkit_estimator.limits import preflight
from smpkit_estimator.request import (
    CODE_CHANNEL,
    TOKEN_CHANNEL,
    TOKEN_NAME,
    SubmitContext,
    TrainingRequest,
    build_request,
)
from smpkit_estimator.sagemaker import request_shape
from smpkit_estimator.sources import Sources, collect

__all__ = ["PARAMETERS_NAME", "Submission", "checked", "job_sources", "packing_notes", "plan_submission", "send"]

PARAMETERS_NAME = "smpkit_mp_parameters.json"
"""The file in the sources that holds `mp_parameters` which are too long for a hyperparameter."""

_LARGE_BYTES = 100 * 2**20
_MAX_ARCHIVE_BYTES = 5 * 2**30
"""The largest object that S3 takes in one call."""
_MAX_UNPACKED_BYTES = 8 * 2**30
"""The most that the launcher unpacks; a job with more would fail on machines that are paid for."""
_SMALLER = "name what the job does not need in .smpkitignore; data belongs into `inputs`"


@dataclass(frozen=True)
class Submission:
    """All that will be sent, decided and checked; nothing was uploaded or started."""

    request: TrainingRequest
    archive_uri: str
    sources: Sources | None
    """What is packed; None if the sources are in S3 already."""
    generated: Mapping[str, bytes]
    """Files that smpkit makes for this job, by name; they go into the archive beside the sources."""
    packed: Packed | None
    kms_key: str | None
    token_uri: str | None = None
    """Where the token goes that the hosts of this job share; None for one host."""
    notes: tuple[str, ...] = ()
    """What the user should know before it is sent."""

    @property
    def job_names(self) -> tuple[str]:
        """The one job that it starts."""
        return self.request.job_names

    @property
    def machines(self) -> str:
        """On what, in words."""
        return self.request.machines

    @property
    def max_seconds(self) -> int | None:
        """How long the job may run."""
        return self.request.max_seconds

    def shown(self) -> dict[str, Any]:
        """The request, without secrets."""
        return self.request.shown()

    def text(self) -> str:
        """The request as YAML."""
        return self.request.text()


def plan_submission(
    job: JobConfig, folder: Path, cloud: Cloud, *, job_name: str | None = None, script_only: bool = False
) -> Submission:
    """Decide everything about a managed job; relative paths start at `folder`.

    Reads local files. Asks the cloud only for what the job does not say: the account, to name its default bucket, and
    the ARN of a role that is given by name.

    Args:
        job_name: the job's unique name; made of `job.name` and the time if None.
        script_only: pack the entry point and the dependencies alone, as SDK v2 does without a `source_dir`.

    Raises:
        ConfigError: the job cannot be sent as it is; lists all problems.
        CloudError: the cloud could not be asked.
    """
    name = job_name or unique_name(job.name, cloud.clock.now())
    problems = list(_not_for_the_cloud(job))
    sources = job_sources(job, folder, problems, script_only=script_only)
    generated = _generated_files(job) if sources is not None else {}
    parameters_file = PARAMETERS_NAME if generated else None
    problems += _limits(job, _placeholders(job, name, parameters_file))
    if problems:
        raise ConfigError(_unique(problems), subject="job for SageMaker")
    packed = fingerprint(sources, generated) if sources is not None else None
    if packed is not None and packed.num_bytes > _MAX_UNPACKED_BYTES:
        message = f"has {_gib(packed.num_bytes)} of files, and a job takes at most {_gib(_MAX_UNPACKED_BYTES)}"
        raise ConfigError([Problem(("source_dir",), message, _SMALLER)], subject="job for SageMaker")
    output = job.output or f"s3://sagemaker-{cloud.region}-{cloud.identity().account}/"
    archive_uri = job.source_dir if packed is None else _archive_uri(job, output, packed.digest)
    context = SubmitContext(
        job_name=name,
        region=cloud.region,
        role=cloud.role_arn(job.role or ""),
        output=output,
        source=archive_uri,
        parameters_file=parameters_file,
        token=_token_uri(job, output, name),
    )
    problems = _limits(job, context)
    if problems:
        raise ConfigError(problems, subject="job for SageMaker")
    notes = [*packing_notes(sources, packed)] if sources is not None and packed is not None else []
    if isinstance(cloud, DryCloud):
        notes += cloud.notes
    key = job.encryption.output_key
    return Submission(
        build_request(job, context), archive_uri, sources, generated, packed, key, context.token, tuple(notes)
    )


def send(submission: Submission, cloud: Cloud) -> str:
    """Upload the sources, unless the same ones are there already, and start the job; return its ARN.

    Raises:
        ConfigError: the sources changed since the submission was planned, or are too large for S3.
        CloudError: the cloud refused or could not be reached.
    """
    if submission.sources is not None and not cloud.object_exists(submission.archive_uri):
        _upload(submission, submission.sources, cloud)
    if submission.token_uri is not None:
        # Drawn here and never kept: not in the plan that is shown, nor on this machine.
        cloud.upload(io.BytesIO(secrets.token_hex(32).encode()), submission.token_uri, submission.kms_key)
    return cloud.create_job(submission.request.body)


def checked(request: TrainingRequest) -> TrainingRequest:
    """Return a request, such as a resumed job's, that was not made from a job file and so is not checked yet.

    Raises:
        ConfigError: the service would refuse it; lists all problems.
    """
    problems = preflight(request.body, request_shape("sagemaker", "CreateTrainingJob"))
    if problems:
        raise ConfigError(problems, subject="request")
    return request


def _upload(submission: Submission, sources: Sources, cloud: Cloud) -> None:
    with tempfile.TemporaryFile(prefix="smpkit-") as file:
        packed = pack(sources, file, submission.generated)
        if submission.packed is not None and packed.digest != submission.packed.digest:
            message = "changed while the job was submitted"
            raise ConfigError([Problem(("source_dir",), message, "submit again")], subject="sources")
        size = file.tell()
        if size > _MAX_ARCHIVE_BYTES:
            message = f"is packed into {_gib(size)}, and S3 takes at most {_gib(_MAX_ARCHIVE_BYTES)} at once"
            raise ConfigError([Problem(("source_dir",), message, _SMALLER)], subject="sources")
        cloud.upload(file, submission.archive_uri, submission.kms_key)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def _not_for_the_cloud(job: JobConfig) -> Iterator[Problem]:
    """Yield the settings that work on this machine but not in the cloud."""
    if job.image is None:
        hint = "push an image with smpkit to ECR, and name it `<account>.dkr.ecr.<region>.amazonaws.com/<name>:<tag>`"
        yield Problem(("image",), "is required for a managed job", hint)
    elif re.match(r"[^/\s]+[.:][^/\s]*/", job.image) is None:
        message = f"names no registry, so SageMaker cannot pull it: `{printable(job.image)}`"
        yield Problem(("image",), message, "`<account>.dkr.ecr.<region>.amazonaws.com/<repository>:<tag>`")
    if job.role is None:
        yield Problem(("role",), "is required for a managed job", "the IAM role that SageMaker takes, by name or ARN")
    if job.compute.is_local:
        hint = "set it to an instance type such as `ml.p4d.24xlarge`, or use `smpkit run`"
        yield Problem(("compute", "instance_type"), "is `local`, which is this machine", hint)
    places: dict[KeyPath, str] = {
        ("inputs", name, "uri"): channel.uri for name, channel in job.inputs.items() if channel.uri is not None
    }
    if job.output is not None:
        places["output",] = job.output
    if job.checkpoints is not None:
        places["checkpoints", "uri"] = job.checkpoints.uri
    for path, uri in places.items():
        if "://" not in uri:
            hint = f"copy it with `aws s3 cp --recursive {uri} s3://...`" if path[0] == "inputs" else "name an S3 URI"
            yield Problem(path, f"is a folder of this machine, `{uri}`, which SageMaker does not see", hint)
    yield from job.input_group_problems()  # inputs may have come after the job was validated
    yield from _out_of_reach(job)


def _out_of_reach(job: JobConfig) -> Iterator[Problem]:
    """Yield what the machines or the container cannot reach over the job's network."""
    if not job.network.subnets:
        hint = "set `network: {subnets: [...], security_groups: [...]}`"
        for name, channel in job.inputs.items():
            if channel.file_system is not None:
                yield Problem(("inputs", name, "file_system"), "is in a VPC, and the job is in none", hint)
        if job.container.registry_access == "Vpc":
            yield Problem(("container", "registry_access"), "is `Vpc`, and the job is in none", hint)
    if job.live_output and job.network.isolation:
        yield Problem(
            ("live_output",), "needs S3, which a container without network does not reach", "remove one of them"
        )
    for name, secret in job.secrets.items():
        if secret.entry is None:
            hint = f"write `{name}: <name or ARN of the entry>`"
            yield Problem(("secrets", name), "names no entry in AWS Secrets Manager", hint)
        if job.network.isolation:
            hint = "SageMaker brings only channels there: put the secret in one, or give the container its network"
            yield Problem(("secrets", name), "cannot be read by a container without network", hint)
    ours = {CODE_CHANNEL: "the sources", TOKEN_CHANNEL: "the hosts' token"} if job.network.isolation else {}
    for name, what in ours.items():
        if name in job.inputs:
            yield Problem(("inputs", name), f"is the channel that brings {what} without network", "rename it")


def job_sources(job: JobConfig, folder: Path, problems: list[Problem], *, script_only: bool) -> Sources | None:
    if "://" in job.source_dir:
        if not job.source_dir.endswith(".tar.gz"):
            problems.append(Problem(("source_dir",), "must be a `.tar.gz` in S3", "or name a local folder"))
        if job.dependencies:
            hint = "put them into the archive"
            problems.append(Problem(("dependencies",), "cannot be added to sources in S3", hint))
        return None
    remote = [name for name in job.dependencies if "://" in name]
    problems += [Problem(("dependencies",), f"must be local, got `{name}`", "copy it here") for name in remote]
    dependencies = [folder / name for name in job.dependencies if name not in remote]
    root = folder / job.source_dir
    if not (root / job.entry_point).is_file():
        problems.append(Problem(("entry_point",), f"there is no file `{job.entry_point}` in `{root}`"))
        return None
    try:
        sources = collect(root, dependencies, only=job.entry_point if script_only else None)
    except ConfigError as error:
        problems += error.problems
        return None
    if all(entry.name != job.entry_point for entry in sources.entries):
        message = f"`{job.entry_point}` is left out by an ignore file or by its name"
        problems.append(Problem(("entry_point",), message, "bring it back with a line `!...` in .smpkitignore"))
    return sources


def _generated_files(job: JobConfig) -> dict[str, bytes]:
    """Return the parameters as a file, if they are too long to be sent themselves."""
    if job.distribution.model_parallel is None:
        return {}
    text = json.dumps(job.distribution.parameters_as_written)
    longest = request_shape("sagemaker", "CreateTrainingJob").members["HyperParameters"].value.metadata["max"]
    return {PARAMETERS_NAME: text.encode()} if len(text) > longest else {}


def _limits(job: JobConfig, context: SubmitContext) -> list[Problem]:
    body = build_request(job, context).body
    algorithm = {name: value for name, value in body["AlgorithmSpecification"].items() if value is not None}
    return preflight({**body, "AlgorithmSpecification": algorithm}, request_shape("sagemaker", "CreateTrainingJob"))


def _placeholders(job: JobConfig, name: str, parameters_file: str | None) -> SubmitContext:
    """Return placeholders that pass every limit, to check the rest before the cloud is asked for the real values."""
    role = job.role if job.role and job.role.startswith("arn:") else "arn:aws:iam::123456789012:role/stand-in"
    return SubmitContext(name, "us-east-1", role, job.output or "s3://bucket/", "s3://bucket/key", parameters_file)


def _unique(problems: list[Problem]) -> list[Problem]:
    """Keep the first problem of each key: that a folder is local says enough, its pattern need not be checked."""
    first: dict[tuple[str | int, ...], Problem] = {}
    for problem in problems:
        first.setdefault(problem.path, problem)
    return list(first.values())


def _archive_uri(job: JobConfig, output: str, digest: str) -> str:
    return f"{_code_folder(job, output)}/{digest}/sourcedir.tar.gz"


def _token_uri(job: JobConfig, output: str, name: str) -> str | None:
    """Return a place beside the sources, which the job's role may read; a new one each time, as names may be reused."""
    if job.compute.num_hosts == 1:
        return None
    return f"{_code_folder(job, output)}/tokens/{name}-{secrets.token_hex(4)}/{TOKEN_NAME}"


def _code_folder(job: JobConfig, output: str) -> str:
    return (job.code_location or f"s3://{split_uri(output)[0]}/smpkit/sources").rstrip("/")


def packing_notes(sources: Sources, packed: Packed) -> Iterator[str]:
    secrets = sorted([*sources.secrets, *packed.secrets])
    if secrets:
        yield f"left out, as secrets are never packed: {_some(secrets)}"
    if packed.suspects:
        yield f"packed, though there seems to be a key in it: {_some(packed.suspects)}"
    if sources.specials:
        yield f"left out, as they are no files: {_some(sources.specials)}"
    if packed.num_bytes > _LARGE_BYTES:
        size = f"{packed.num_bytes / 2**20:,.0f} MiB in {packed.num_files:,} files"
        yield f"the sources have {size}; name what the job does not need in .smpkitignore"


def _some(names: Sequence[str]) -> str:
    listed = [f"`{name}`" for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
