"""Check what a job on Kubernetes needs, one finding for each thing, with what to do about it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from smpkit.config.job import JobConfig
from smpkit_estimator.finding import Finding, tried
from smpkit_estimator.kubernetes.api import Api
from smpkit_estimator.kubernetes.manifests import JOBSET

__all__ = ["check_cluster"]

_NEEDED = (1, 29)
"""The first version that ends the hosts of an Indexed Job one by one (`backoffLimitPerIndex`) by itself."""
_RIGHTS = (
    *(("create", "jobs", "batch", ""), ("patch", "jobs", "batch", ""), ("list", "jobs", "batch", "")),
    *(("create", "configmaps", "", ""), ("get", "configmaps", "", ""), ("patch", "configmaps", "", "")),
    *(("create", "secrets", "", ""), ("get", "secrets", "", ""), ("patch", "secrets", "", "")),
    *(("create", "services", "", ""), ("patch", "services", "", "")),
    *(("list", "pods", "", ""), ("get", "pods", "", "log")),
)


def check_cluster(open_api: Callable[[], Api], job: JobConfig | None, *, write: bool = False) -> list[Finding]:
    """Look at the cluster, at the rights in the namespace, and at what a job names.

    Args:
        write: also create and delete a small ConfigMap.
    """
    reached = tried("kubernetes", lambda: _version(open_api()), needed=job is not None)
    if reached.state != "ok":
        return [reached]
    api = open_api()
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("rights", lambda: _rights(api)),
        ("workload", lambda: _workload(api, job)),
    ]
    if write:
        checks.append(("write", lambda: _write(api)))
    if job is not None:
        options = job.backend.kubernetes
        if options.queue is not None:
            queue = options.queue
            checks.append(("queue", lambda: _queue(api, queue)))
        claims = [volume.claim for volume in options.volumes if volume.claim is not None]
        checks += [(f"volume {claim}", lambda claim=claim: _claim(api, claim, job)) for claim in claims]  # type: ignore[misc]
        checks.append(("image", lambda: _image(job)))
    return [reached, *(tried(what, check) for what, check in checks)]


def _version(api: Api) -> Finding:
    version = api.version()
    found = re.match(r"v?(\d+)\.(\d+)", version)
    text = f"Kubernetes {version} at {api.host}, namespace `{api.namespace}`"
    if found and (int(found[1]), int(found[2])) < _NEEDED:
        needed = ".".join(map(str, _NEEDED))
        return Finding("kubernetes", "problem", f"{text}: jobs need {needed} or later", "choose another cluster")
    return Finding("kubernetes", "ok", text)


def _rights(api: Api) -> Finding:
    missing = [
        f"{verb} {resource}{f'/{sub}' if sub else ''}"
        for verb, resource, group, sub in _RIGHTS
        if not api.may(verb, resource, group, sub)
    ]
    if missing:
        hint = f"a Role in the namespace `{api.namespace}` must allow it"
        return Finding("rights", "problem", f"this identity may not: {', '.join(missing)}", hint)
    return Finding("rights", "ok", f"this identity may start and watch jobs in `{api.namespace}`")


def _workload(api: Api, job: JobConfig | None) -> Finding:
    wanted = job.backend.kubernetes.workload if job is not None else "auto"
    there = api.has_group(JOBSET.partition("/")[0])
    if wanted == "jobset" and not there:
        hint = "install JobSet in the cluster, or set `backend.kubernetes.workload: job`"
        return Finding("workload", "problem", "the cluster has no JobSets", hint)
    kind = "a JobSet" if there and wanted != "job" else "an Indexed Job"
    return Finding("workload", "ok", f"jobs become {kind}")


def _write(api: Api) -> Finding:
    name = f"smpkit-doctor-{secrets.token_hex(4)}"
    api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": api.namespace}})
    api.delete("ConfigMap", name)
    return Finding("write", "ok", f"created and deleted a ConfigMap in `{api.namespace}`")


def _queue(api: Api, queue: str) -> Finding:
    if not api.has_group("kueue.x-k8s.io"):
        hint = "install Kueue in the cluster, or remove `backend.kubernetes.queue`"
        return Finding("queue", "problem", "the cluster has no Kueue, so nobody would let the job run", hint)
    if api.read("LocalQueue", queue) is None:
        hint = "`kubectl get localqueues` lists them"
        return Finding("queue", "problem", f"there is no LocalQueue `{queue}` in `{api.namespace}`", hint)
    return Finding("queue", "ok", f"LocalQueue `{queue}` is there")


def _claim(api: Api, claim: str, job: JobConfig) -> Finding:
    found = api.read("PersistentVolumeClaim", claim)
    if found is None:
        hint = "`kubectl get pvc` lists them"
        return Finding("volume", "problem", f"there is no claim `{claim}` in `{api.namespace}`", hint)
    modes = found["spec"].get("accessModes", [])
    if job.compute.num_hosts > 1 and not set(modes) & {"ReadWriteMany", "ReadOnlyMany"}:
        text = f"claim `{claim}` is {', '.join(modes)}: pods on several nodes cannot mount it"
        return Finding("volume", "problem", text, "several hosts need a claim with ReadWriteMany")
    return Finding("volume", "ok", f"claim `{claim}` is {', '.join(modes)}")


def _image(job: JobConfig) -> Finding:
    if job.image is None:
        return Finding("image", "problem", "the job names no image", "set `image` to one with smpkit")
    return Finding("image", "info", f"image {job.image}: only the nodes can tell whether they can pull it")
