"""From a job file to the objects that the API gets, decided and checked first."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from smpkit.config.confidential import HIDDEN, masked
from smpkit.config.explain import validated
from smpkit.config.job import JobConfig
from smpkit.config.words import quoted
from smpkit.errors import ConfigError, Problem
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
from smpkit_estimator.kubernetes.manifests import LONGEST_NAME, Facts, manifests
from smpkit_estimator.local import local_secrets
from smpkit_estimator.sources import Sources, job_sources, pack, packing_notes

__all__ = ["KubernetesPlan", "plan_job", "plan_resumed", "proper_name"]

_NAME = re.compile(rf"(?=.{{1,{LONGEST_NAME}}}$)[a-z]([a-z0-9-]*[a-z0-9])?")
_MAX_BYTES = 2**20
"""What the API takes as the content of one ConfigMap or Secret."""


@dataclass(frozen=True)
class KubernetesPlan:
    """All that will be sent, decided and checked; nothing was sent."""

    facts: Facts
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
        count, options = self.facts.spec["nodes"], self.facts.options
        gpus = f" of {options.gpus} GPU{'s' * (options.gpus != 1)}" if options.gpus else ""
        return f"{count} pod{'s' * (count != 1)}{gpus}"

    @property
    def max_seconds(self) -> int | None:
        """How long the job may run; None for ever."""
        compute = self.facts.job.compute
        return compute.max_run_seconds if "max_run_seconds" in compute.model_fields_set else None

    def shown(self) -> dict[str, Any]:
        """The objects without secrets; the sources by their size and digest."""
        return {"manifests": [_shown(each) for each in manifests(self.facts, HIDDEN)]}

    def text(self) -> str:
        """The same as YAML."""
        import yaml

        plain = json.loads(json.dumps(self.shown()["manifests"]))  # else what occurs twice becomes an alias
        text: str = yaml.safe_dump_all(plain, sort_keys=False, allow_unicode=True, width=120)
        return text


def _shown(manifest: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(manifest)
    if manifest["kind"] == "Secret":
        shown["stringData"] = dict.fromkeys(manifest["stringData"], HIDDEN)
    if manifest["kind"] == "ConfigMap":
        spec, kept = (json.loads(manifest["data"][name]) for name in ("spec.json", "job.json"))
        shown["data"] = {
            "spec.json": json.dumps(shown_spec(spec), ensure_ascii=False),
            "job.json": json.dumps(masked("", kept), ensure_ascii=False),
        }
        shown |= {"binaryData": {name: _told(text) for name, text in manifest.get("binaryData", {}).items()}}
    return shown


def _told(encoded: str) -> str:
    import base64

    data = base64.b64decode(encoded)
    return f"({len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()})"


def proper_name(base: str) -> str:
    """Make of a job's name one that Kubernetes takes: lower case, beginning with a letter."""
    name = base.lower()
    return name if name[:1].isalpha() else f"job-{name}"


def plan_job(
    job: JobConfig, folder: Path, name: str, now: datetime, *, namespace: str, jobset: bool, script_only: bool = False
) -> KubernetesPlan:
    """Decide everything about a job on Kubernetes; relative paths start at `folder`.

    Raises:
        ConfigError: the job cannot be sent as it is; lists all problems.
    """
    options = job.backend.kubernetes
    problems = list(_not_for_kubernetes(job, name))
    sources = None
    if options.code is None:
        sources = job_sources(job, folder, problems, script_only=script_only)
        if sources is None and "://" in job.source_dir:
            hint = "name a local folder, or set `backend.kubernetes.code`"
            problems.append(Problem(("source_dir",), "is in S3, which pods do not read", hint))
    secrets = dict(local_secrets(job, os.environ, problems))
    problems += world_problems(job, job.compute.num_hosts)
    if problems:
        raise ConfigError(first_of_each(problems), subject="job for Kubernetes")
    archive, packed_notes = _packed(sources)
    facts = Facts(
        name=name,
        namespace=namespace,
        job=job,
        spec=_spec(job, name, now),
        kept=job_to_keep(job),
        archive=archive,
        secrets=secrets,
        jobset=jobset,
    )
    _check_sizes(facts)
    return KubernetesPlan(facts, (*_notes(job), *packed_notes))


def plan_resumed(
    old: str,
    config: Mapping[str, Any],
    archive: bytes | None,
    secrets: Mapping[str, str],
    name: str,
    now: datetime,
    changes: Mapping[str, Any],
    *,
    namespace: str,
    jobset: bool,
) -> KubernetesPlan:
    """Plan a job like another one that goes on from its checkpoints: the same sources, image and settings.

    Args:
        config: the other job's file, as it was kept.

    Raises:
        ConfigError: the number of hosts does not fit the job.
    """
    kept = json.loads(json.dumps(config))
    compute = kept.setdefault("compute", {})
    if "InstanceCount" in changes:
        compute["instance_count"] = changes["InstanceCount"]
    if "MaxRuntimeInSeconds" in changes:
        compute["max_run_seconds"] = changes["MaxRuntimeInSeconds"]
    job = validated(JobConfig, kept, subject="job")
    problems = [*_not_for_kubernetes(job, name), *world_problems(job, job.compute.num_hosts)]
    if problems:
        raise ConfigError(first_of_each(problems), subject="job for Kubernetes")
    facts = Facts(name, namespace, job, _spec(job, name, now), job_to_keep(job), archive, secrets, jobset, old)
    return KubernetesPlan(facts, tuple(_notes(job)))


def _spec(job: JobConfig, name: str, now: datetime) -> dict[str, Any]:
    options = job.backend.kubernetes
    return described_job(
        job,
        name,
        now,
        options.code or "",
        kind="kubernetes",
        prefix="pod",
        port=options.port,
        interface=options.interface,
        grace_seconds=options.grace_seconds,
    )


def _not_for_kubernetes(job: JobConfig, name: str) -> Iterator[Problem]:
    if _NAME.fullmatch(name) is None:
        message = f"makes the name {quoted(name)}, and on Kubernetes it has 1 to {LONGEST_NAME} characters"
        yield Problem(("name",), message, "lower-case letters, digits and hyphens, the first a letter")
    if job.image is None:
        yield Problem(("image",), "is required on Kubernetes", "an image with smpkit that the nodes can pull")
    yield from not_for_schedulers(job, "Kubernetes")
    mounts = [volume.mount for volume in job.backend.kubernetes.volumes]
    yield from place_problems(job, mounts, "backend.kubernetes.volumes")


def _packed(sources: Sources | None) -> tuple[bytes | None, list[str]]:
    if sources is None:
        return None, []
    file = io.BytesIO()
    packed = pack(sources, file)
    return file.getvalue(), list(packing_notes(sources, packed))


def _check_sizes(facts: Facts) -> None:
    """Refuse what the API would, before anything is sent.

    Raises:
        ConfigError: the ConfigMap or the Secret is too large; says which part of it.
    """
    sizes = {
        "the packed sources": len(facts.archive or b""),
        "hyperparameters and environment": sum(len(json.dumps(each).encode()) for each in (facts.spec, facts.kept)),
    }
    secrets, whole = len(json.dumps(dict(facts.secrets)).encode()), sum(sizes.values())
    if secrets > _MAX_BYTES:
        message = f"have {secrets:,} bytes, and a Secret takes {_MAX_BYTES:,}"
        raise ConfigError([Problem(("secrets",), message)], subject="job for Kubernetes")
    if whole <= _MAX_BYTES:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    path = ("source_dir",) if largest == "the packed sources" else ("hyperparameters",)
    message = f"makes {whole:,} bytes for a ConfigMap, which takes {_MAX_BYTES:,}; most are {largest}"
    hint = (
        "name what the job does not need in .smpkitignore, or put the sources into the image or a volume and set "
        "`backend.kubernetes.code` to their folder"
    )
    raise ConfigError([Problem(path, message, hint)], subject="job for Kubernetes")


def _notes(job: JobConfig) -> Iterator[str]:
    unused = unused_settings(job)
    if unused:
        yield f"not used on Kubernetes: {', '.join(f'`{name}`' for name in unused)}"
    if job.distribution.launcher == "mpirun":
        yield "the ranks are started with torchrun, not mpirun: on Kubernetes, pods do not start processes in others"
    if job.output is None:
        yield "the model stays in the pods and goes with them: `output` names a folder in a volume"
    if job.checkpoints is None:
        yield "without `checkpoints` in a volume, pods that are evicted begin anew"
