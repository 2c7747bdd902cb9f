"""The back end `kubernetes`: what its commands do to plan, start, watch and stop jobs."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from smpkit.config.documents import as_yaml
from smpkit.config.job import JobConfig
from smpkit.config.words import quoted
from smpkit.errors import CloudError, ConfigError, Problem, SmpkitError, UnreachableError, UsageError
from smpkit.units import things
from smpkit_estimator import scheduled
from smpkit_estimator.backend import (
    Access,
    Clock,
    Finding,
    LogLine,
    Plan,
    Query,
    StandIns,
    base_name,
    in_doubt,
    refuse,
    tried,
    unique_name,
)
from smpkit_estimator.checkpoints import newest_in_folder
from smpkit_estimator.kubernetes.api import Api, Object, connect
from smpkit_estimator.kubernetes.manifests import (
    JOB_LABEL,
    LONGEST_NAME,
    MANAGED_BY,
    QUEUE_LABEL,
    SOURCES,
    SUBMISSION,
    VARIABLE,
    manifests,
    shown_manifest,
)
from smpkit_estimator.kubernetes.state import STOPPED_AT, PodLog, status_of
from smpkit_estimator.local import local_secrets
from smpkit_estimator.sources import job_sources, pack, packing_notes
from smpkit_estimator.status import JobStatus

_NAME = re.compile(rf"(?=.{{1,{LONGEST_NAME}}}$)[a-z]([a-z0-9-]*[a-z0-9])?")
_MAX_BYTES = 2**20
"""What the API takes as the content of one ConfigMap or Secret."""
_OLDEST = (1, 29)
"""The first version that ends the hosts of an Indexed Job one by one (`backoffLimitPerIndex`) by itself."""


class KubernetesCluster:
    """The jobs in one namespace of a cluster of the kubeconfig.

    Args:
        access: the context as `profile` and the namespace as `region`; whoever opens this takes those of the job file.
    """

    def __init__(self, access: Access) -> None:
        self.clock = Clock()
        self.pace = 2.0
        self._access = access

    @cached_property
    def _api(self) -> Api:
        return connect(self._access.profile, self._access.region)

    @property
    def title(self) -> str:
        try:
            return f"Kubernetes in namespace `{self._api.namespace}` of {self._api.host}"
        except SmpkitError:
            return "Kubernetes in no cluster"

    def plan(self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False) -> Plan:
        chosen = name or unique_name(_proper_name(job.name), self.clock.now(), LONGEST_NAME)
        unknown, asked = StandIns(dry), self._access.region
        words = "" if asked else ": the namespace may be another"
        namespace = unknown.get(lambda: self._api.namespace, asked or "default", words)
        problems = list(_not_for_kubernetes(job, chosen))
        sources = None
        if job.backend.kubernetes.code is None:
            hint = "name a local folder, or set `backend.kubernetes.code`"
            sources = job_sources(job, folder, problems, instead_of_s3=hint)
        hidden = dict(local_secrets(job, problems))
        refuse(problems, "Kubernetes")
        notes, archive = unknown.notes, None
        if sources is not None:
            file = io.BytesIO()
            notes += packing_notes(pack(sources, file))
            archive = file.getvalue()
        return _plan(job, chosen, namespace, archive, hidden, notes)

    def submit(self, plan: Plan) -> dict[str, Any]:
        job, *parts = plan.payload
        try:
            owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": plan.name}
            owner["uid"] = _created(self._api, job)["metadata"]["uid"]
            for part in parts:
                _created(self._api, {**part, "metadata": {**part["metadata"], "ownerReferences": [owner]}})
        except (SmpkitError, KeyboardInterrupt):  # its pods would wait for the rest, and keep their GPUs
            with contextlib.suppress(CloudError):
                if _own(self._api, job) is not None:  # Ctrl-C may have come before the answer did
                    self._api.delete("Job", plan.name)  # and what it owns
            raise
        namespace = self._api.namespace
        return {"name": plan.name, "arn": f"kubernetes:{namespace}/{plan.name}", "namespace": namespace}

    def describe(self, name: str) -> JobStatus:
        job = self._job(name)
        return status_of(job, [*self._api.list("Pod", f"{JOB_LABEL}={name}")], self.clock.now())

    def log(self, name: str, *, since: datetime | None = None, tail: int | None = None) -> Iterator[list[LogLine]]:
        self._job(name)
        return iter(PodLog(self._api, name, self.clock, since, tail).read, None)

    def stop(self, name: str) -> None:
        """End the job: its pods get SIGTERM, and Kubernetes deletes them, and their logs, when they have ended."""
        job = self._job(name)
        if status_of(job, [], self.clock.now()).over:
            return
        asked: dict[str, Any] = {"annotations": {STOPPED_AT: self.clock.now().isoformat()}}
        if job["spec"].get("suspend"):
            # It waits in a queue, or would: without the queue's label nobody lets it run.
            self._api.patch("Job", name, {"metadata": {**asked, "labels": {QUEUE_LABEL: None}}})
            return
        # A limit that is over is the one way to end a Job for good that keeps it.
        self._api.patch("Job", name, {"metadata": asked, "spec": {"activeDeadlineSeconds": 1}})

    def list(self, query: Query) -> Iterator[JobStatus]:
        now = self.clock.now()
        jobs = [status_of(job, [], now) for job in self._api.list("Job", f"{MANAGED_BY}=smpkit")]
        yield from query.of(sorted(jobs, key=lambda job: job.created, reverse=True), now)

    def resumed(self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None) -> Plan:
        sent = self._sent("ConfigMap", name)
        kept = json.loads(sent["data"]["job.json"])
        job = scheduled.job_again(kept, changes, machine="backend.kubernetes.node_selector")
        chosen = new_name or unique_name(base_name(name), self.clock.now(), LONGEST_NAME)
        refuse(_not_for_kubernetes(job, chosen), "Kubernetes")
        # Not everybody may read Secrets: of a job without secrets none is asked for.
        data = self._sent("Secret", name)["data"] if job.secrets else {}
        hidden = {key: base64.b64decode(data[f"{VARIABLE}{key}"]).decode() for key in job.secrets}
        sources = sent.get("binaryData", {}).get(SOURCES)
        archive = base64.b64decode(sources) if sources is not None else None
        return _plan(job, chosen, self._api.namespace, archive, hidden, [])

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:  # noqa: ARG002
        reached = tried("kubernetes", lambda: _version(self._api), needed=job is not None)
        if job is None or reached.state != "ok":
            return [reached]
        return [reached, tried("job", lambda: _acceptable(self._api, job))]

    def results(self, name: str, into: Path) -> Path:  # noqa: ARG002 - nothing is copied
        kept = json.loads(self._sent("ConfigMap", name)["data"]["job.json"])
        return scheduled.run_in_volume(scheduled.job_again(kept, None), name, "a volume of the cluster")

    def latest_checkpoint(self, place: str) -> str | None:
        return newest_in_folder(place, "a volume of the cluster")

    def _job(self, name: str) -> Object:
        """Return the Job whose pods are the hosts."""
        job = self._api.read("Job", name) if name == _proper_name(name) else None
        if job is None or job["metadata"].get("labels", {}).get(MANAGED_BY) != "smpkit":
            message = f"there is no job `{name}` in namespace `{self._api.namespace}`"
            raise UsageError(message, hint="`smpkit jobs` lists them; `--region` names another namespace")
        return job

    def _sent(self, kind: str, name: str) -> Object:
        """Return an object that was sent with a job."""
        self._job(name)
        sent = self._api.read(kind, name)
        if sent is None:
            hint = f"`kubectl delete job {name}` forgets it"
            raise CloudError(f"the {kind} `{name}` of the job is gone", hint=hint)
        return sent


def _plan(
    job: JobConfig,
    name: str,
    namespace: str,
    archive: bytes | None,
    hidden: Mapping[str, str],
    notes: Sequence[str],
) -> Plan:
    objects = manifests(job, name, namespace, archive=archive, secrets=hidden, token=secrets.token_hex(32))
    _check_sizes(objects[1], objects[2])
    shown = [shown_manifest(manifest) for manifest in objects]
    gpus = job.backend.kubernetes.gpus
    return Plan(
        name=name,
        machines=things(job.compute.instance_count, "pod") + (f" of {things(gpus, 'GPU')}" if gpus else ""),
        shown={"manifests": shown},
        payload=objects,
        max_seconds=scheduled.limit_of(job),
        notes=(*_notes(job), *notes),
        script=as_yaml(*shown),
    )


def _proper_name(base: str) -> str:
    """Make of a job's name one that Kubernetes takes: lower case, beginning with a letter."""
    name = base.lower()
    return name if name[:1].isalpha() else f"job-{name}"


def _not_for_kubernetes(job: JobConfig, name: str) -> Iterator[Problem]:
    if _NAME.fullmatch(name) is None:
        message = f"makes the name {quoted(name)}, and on Kubernetes it has 1 to {LONGEST_NAME} characters"
        yield Problem(("name",), message, "lower-case letters, digits and hyphens, the first a letter")
    if job.image is None:
        yield Problem(("image",), "is required on Kubernetes", "an image with smpkit that the nodes can pull")
    if job.dependencies and job.backend.kubernetes.code is not None:
        hint = "put them into that folder, or remove `backend.kubernetes.code`"
        yield Problem(("dependencies",), "are not sent: `backend.kubernetes.code` names a folder with sources", hint)
    yield from scheduled.not_for_schedulers(job)
    mounts = [volume.mount for volume in job.backend.kubernetes.volumes]
    yield from scheduled.place_problems(job, mounts, "backend.kubernetes.volumes")


def _check_sizes(files: Object, secret: Object) -> None:
    """Refuse a ConfigMap or Secret that is too large for the API, before anything is sent."""
    hidden = sum(map(len, secret["stringData"].values()))
    if hidden > _MAX_BYTES:
        message = f"have {hidden:,} bytes, and a Secret takes {_MAX_BYTES:,}"
        raise ConfigError([Problem(("secrets",), message)], subject="job for Kubernetes")
    packed = sum(len(text) * 3 // 4 for text in files.get("binaryData", {}).values())
    settings = sum(len(text.encode()) for text in files["data"].values())
    if packed + settings <= _MAX_BYTES:
        return
    largest, path = (
        ("the packed sources", "source_dir") if packed > settings else ("hyperparameters", "hyperparameters")
    )
    message = f"makes {packed + settings:,} bytes for a ConfigMap, which takes {_MAX_BYTES:,}; most are {largest}"
    hint = (
        "name what the job does not need in .smpkitignore, or put the sources into the image or a volume and set "
        "`backend.kubernetes.code` to their folder"
    )
    raise ConfigError([Problem((path,), message, hint)], subject="job for Kubernetes")


def _notes(job: JobConfig) -> Iterator[str]:
    yield from scheduled.notes(job, "Kubernetes", "on Kubernetes, pods do not start processes in others")
    if job.output is None:
        yield "the model stays in the pods and goes with them: `output` names a folder in a volume"
    if job.checkpoints is None:
        yield "without `checkpoints` in a volume, pods that are evicted begin anew"


def _created(api: Api, manifest: Object) -> Object:
    """Create an object; if no answer came, look once whether it was created, and by this submission."""
    try:
        return api.create(manifest)
    except UnreachableError as error:
        with contextlib.suppress(CloudError):
            if (there := _own(api, manifest)) is not None:
                return there
        raise in_doubt(error, manifest["metadata"]["name"]) from None


def _own(api: Api, manifest: Object) -> Object | None:
    """Return the object of this name in the cluster if this submission has created it."""
    there = api.read(manifest["kind"], manifest["metadata"]["name"])
    ours = manifest["metadata"].get("annotations", {}).get(SUBMISSION)
    return there if there and (there["metadata"].get("annotations") or {}).get(SUBMISSION) == ours else None


def _version(api: Api) -> Finding:
    version = api.version()
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    text = f"Kubernetes {version} at {api.host}, namespace `{api.namespace}`"
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        return Finding("kubernetes", "problem", f"{text}: jobs need {needed} or later", "choose another cluster")
    return Finding("kubernetes", "ok", text)


def _acceptable(api: Api, job: JobConfig) -> Finding:
    """Let the API check all objects of the job, with the rights to create them; it creates none."""
    name = unique_name(_proper_name(job.name), Clock().now(), LONGEST_NAME)
    for manifest in manifests(job, name, api.namespace, archive=b"", secrets={}, token=""):
        api.create(manifest, dry=True)
    return Finding("job", "ok", f"the cluster would take the job in `{api.namespace}`")
