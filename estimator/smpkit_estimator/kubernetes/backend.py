"""The back end `kubernetes`: what its commands do to plan, start, watch and stop jobs."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, SmpkitError, UnreachableError, UnsupportedError, UsageError
from smpkit_estimator.backend import Access, JobSummary, Log, Pace, Query
from smpkit_estimator.clock import SystemClock
from smpkit_estimator.described import shown_spec
from smpkit_estimator.files import Files, folder_here
from smpkit_estimator.finding import Finding
from smpkit_estimator.kubernetes.api import Api, Object, connect
from smpkit_estimator.kubernetes.doctor import check_cluster
from smpkit_estimator.kubernetes.log import PodLog
from smpkit_estimator.kubernetes.manifests import JOB_LABEL, JOBSET, LONGEST_NAME, MANAGED_BY, QUEUE_LABEL, manifests
from smpkit_estimator.kubernetes.plan import KubernetesPlan, plan_job, plan_resumed, proper_name
from smpkit_estimator.kubernetes.status import STOPPED_AT, state_of, status_of
from smpkit_estimator.names import base_name, unique_name
from smpkit_estimator.run_folder import run_in_volume
from smpkit_estimator.status import FINAL, JobStatus

__all__ = ["KubernetesCluster", "open_kubernetes"]

_SOURCES = "sourcedir.tar.gz"


class KubernetesCluster:
    """The jobs in one namespace of a cluster."""

    def __init__(self, access: Access) -> None:
        self.clock = SystemClock()
        self.pace = Pace(poll=2.0, streams_per_second=20.0, settle=1.0, wait=2.0)
        self._access = access

    @cached_property
    def _api(self) -> Api:
        return connect(self._access.profile, self._access.region)

    @property
    def place(self) -> str:
        try:
            return f"namespace `{self._api.namespace}` of {self._api.host}"
        except SmpkitError:
            return "no cluster"

    @property
    def title(self) -> str:
        return f"Kubernetes in {self.place}"

    def plan(
        self, job: JobConfig, folder: Path, *, name: str | None = None, dry: bool = False, script_only: bool = False
    ) -> KubernetesPlan:
        now = self.clock.now()
        chosen = name or unique_name(proper_name(job.name), now, LONGEST_NAME)
        options = job.backend.kubernetes
        # The command line goes before the job file.
        self._access = Access(self._access.profile or options.context, self._access.region or options.namespace)
        self.__dict__.pop("_api", None)
        notes: list[str] = []
        try:
            namespace = self._api.namespace
            jobset = options.workload == "jobset"
            if options.workload == "auto":
                jobset = self._api.has_group(JOBSET.partition("/")[0])
        except CloudError as error:
            if not dry:
                raise
            namespace, jobset = options.namespace or "default", options.workload == "jobset"
            notes.append(f"{error.message}: whether it has JobSets is not known, and the namespace may be another")
        plan = plan_job(job, folder, chosen, now, namespace=namespace, jobset=jobset, script_only=script_only)
        if options.namespace is not None and not self._may_look_everywhere():
            notes.append(f"later commands find the job with `--region {namespace}`, or in a context of that namespace")
        return KubernetesPlan(plan.facts, (*plan.notes, *notes))

    def _may_look_everywhere(self) -> bool:
        try:
            return self._api.may("list", "jobs", "batch", everywhere=True)
        except CloudError:
            return False

    def submit(self, plan: KubernetesPlan) -> dict[str, Any]:
        *parts, workload = manifests(plan.facts, secrets.token_hex(32))
        made: list[Object] = []
        try:
            for manifest in parts:
                self._api.create(manifest)
                made.append(manifest)
            answer = self._created(workload)
        except UnreachableError as error:
            hint = f"`smpkit status {plan.name}` tells whether it was; look before you start another"
            raise UnreachableError(f"{error.message}; it may have been started all the same", hint=hint) from None
        except CloudError:
            for each in made:
                with contextlib.suppress(CloudError):
                    self._api.delete(each["kind"], plan.name)
            raise
        owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": plan.name}
        owner["uid"] = answer["metadata"]["uid"]
        for manifest in parts:  # so that deleting the job deletes them
            self._api.patch(manifest["kind"], plan.name, {"metadata": {"ownerReferences": [owner]}})
        place = f"{self._api.namespace}/{plan.name}"
        return {
            "name": plan.name,
            "arn": f"kubernetes:{place}",
            "kind": workload["kind"],
            "namespace": plan.facts.namespace,
        }

    def _created(self, workload: Object) -> Object:
        """Create the Job or JobSet; if no answer came, look whether it was created."""
        try:
            return self._api.create(workload)
        except UnreachableError:
            with contextlib.suppress(CloudError):
                found = self._api.read(workload["kind"], workload["metadata"]["name"])
                if found is not None:
                    return found
            raise

    def describe(self, name: str) -> JobStatus:
        job, spec = self._job(name), self._files(name)["spec.json"]
        return status_of(name, job, self._pods(name), spec, self.clock.now())

    def details(self, name: str) -> dict[str, Any]:
        job, spec = self._job(name), self._files(name)["spec.json"]
        pods = [{"name": pod["metadata"]["name"], "status": pod.get("status", {})} for pod in self._pods(name)]
        return {**shown_spec(spec), "job": job, "pods": pods}

    def logs(self, name: str, since: datetime | None = None) -> Log:
        self._job(name)  # which finds its namespace
        return PodLog(self._api, name, self.clock, since, lambda: state_of(self._job(name))[0] in FINAL)

    def stop(self, name: str) -> None:
        """End the job: its pods get SIGTERM, and Kubernetes deletes them, and their logs, when they have ended."""
        job = self._job(name)
        if state_of(job)[0] in FINAL:
            return
        if _is_jobset(job):
            hint = "try again in a moment"
            raise UnreachableError(f"cannot stop job `{name}`: the cluster has not made its Job yet", hint=hint)
        child = job["metadata"]["name"]
        asked = {"metadata": {"annotations": {STOPPED_AT: datetime.now(timezone.utc).isoformat()}}}
        if job["spec"].get("suspend"):
            # It waits in a queue, or would: without the queue's label nobody lets it run.
            self._api.patch("Job", child, {"metadata": {**asked["metadata"], "labels": {QUEUE_LABEL: None}}})
            if child != name:
                self._api.patch(
                    "JobSet", name, {"metadata": {"labels": {QUEUE_LABEL: None}}, "spec": {"suspend": True}}
                )
            return
        # A limit that is over is the one way to end a Job for good that keeps it.
        self._api.patch("Job", child, {**asked, "spec": {"activeDeadlineSeconds": 1}})

    def list(self, query: Query) -> Iterator[JobSummary]:
        now = self.clock.now()
        found = sorted(self._jobs(), key=lambda item: str(item[1]["metadata"]["creationTimestamp"]), reverse=True)
        count = 0
        for name, job in found:
            created = datetime.fromisoformat(job["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
            status, phase, ended = state_of(job)
            if query.name is not None and query.name not in name:
                continue
            if query.since is not None and created < now - query.since:
                continue
            if query.status is not None and status.lower() != query.status.lower():
                continue
            arn = f"kubernetes:{job['metadata']['namespace']}/{job['metadata']['name']}"
            yield JobSummary(name, arn, status, phase, created, ended)
            count += 1
            if count == query.limit:
                return

    def resumed(
        self, name: str, new_name: str | None = None, changes: Mapping[str, Any] | None = None
    ) -> KubernetesPlan:
        changes = changes or {}
        if "InstanceType" in changes:
            hint = "submit the job file with another `backend.kubernetes.node_selector`, and the same `checkpoints`"
            raise UnsupportedError("`--instance-type` is not for Kubernetes, whose pods have no types", hint=hint)
        job, files = self._job(name), self._files(name)
        secret = self._api.read("Secret", name) or {}
        hidden = secret.get("data", {}).get("secrets.json")
        now = self.clock.now()
        return plan_resumed(
            name,
            files["job.json"],
            base64.b64decode(files[_SOURCES]) if _SOURCES in files else None,
            json.loads(base64.b64decode(hidden)) if hidden else {},
            new_name or unique_name(base_name(name), now, LONGEST_NAME),
            now,
            changes,
            namespace=self._api.namespace,
            jobset=_is_jobset(job) or job["metadata"]["name"] != name,
        )

    def files(self, place: str) -> Files:
        return folder_here(place, "a volume of the cluster")

    def run_folder(self, name: str, into: Path) -> Path:  # noqa: ARG002 - nothing is copied
        self._job(name)  # which finds its namespace
        places = self._files(name)["spec.json"]["places"]
        return run_in_volume(places, name, "a volume of the cluster")

    def check(self, job: JobConfig | None, *, write: bool = False) -> Sequence[Finding]:
        options = job.backend.kubernetes if job is not None else None
        if options is not None:
            self._access = Access(self._access.profile or options.context, self._access.region or options.namespace)
        return check_cluster(lambda: self._api, job, write=write)

    def _jobs(self) -> Iterator[tuple[str, Object]]:
        for job in self._api.list("Job", f"{MANAGED_BY}=smpkit,{JOB_LABEL}"):
            yield job["metadata"]["labels"][JOB_LABEL], job

    def _job(self, name: str) -> Object:
        """Return the Job whose pods are the hosts; its namespace is that of all calls after this one.

        Raises:
            UsageError: there is none.
        """
        selector = f"{MANAGED_BY}=smpkit,{JOB_LABEL}={name}"
        hint = "`smpkit jobs` lists them; `--region` names another namespace"
        message = f"there is no job `{name}` in namespace `{self._api.namespace}`"
        if name == proper_name(name):
            found = next(iter(self._api.list("Job", selector)), None)
            if found is None and self._api.has_group(JOBSET.partition("/")[0]):
                found = self._api.read("JobSet", name)
                # Its Job is not made yet.
                found = {**found, "status": {}} if found is not None else None
            if found is not None:
                return found
            elsewhere = self._elsewhere(selector)
            if len(elsewhere) == 1:
                self._access = replace(self._access, region=elsewhere[0])
                del self.__dict__["_api"]
                return self._job(name)
            if elsewhere:
                hint = f"there are some in {', '.join(elsewhere)}; choose one with `--region`"
        raise UsageError(message, hint=hint)

    def _elsewhere(self, selector: str) -> Sequence[str]:
        """Return the other namespaces that have such a job, unless the user chose one; none if nobody may look."""
        if self._access.region is not None:
            return []
        with contextlib.suppress(CloudError):
            return sorted(self._api.namespaces_of_jobs(selector) - {self._api.namespace})
        return []

    def _files(self, name: str) -> dict[str, Any]:
        """Return what was sent beside the job: descriptions as objects, the sources in base64."""
        found = self._api.read("ConfigMap", name)
        if found is None:
            raise CloudError(
                f"the ConfigMap `{name}` of the job is gone", hint=f"`kubectl delete job {name}` forgets it"
            )
        data = {key: json.loads(text) for key, text in found["data"].items()}
        return {**data, **found.get("binaryData", {})}

    def _pods(self, name: str) -> Sequence[Object]:
        return [*self._api.list("Pod", f"{JOB_LABEL}={name}")]


def _is_jobset(job: Object) -> bool:
    """Tell whether this is a JobSet whose Job is not made yet."""
    return bool(job.get("kind") == "JobSet")


def open_kubernetes(access: Access) -> KubernetesCluster:
    """Open the cluster of the kubeconfig: `profile` is the context, `region` the namespace."""
    return KubernetesCluster(access)
