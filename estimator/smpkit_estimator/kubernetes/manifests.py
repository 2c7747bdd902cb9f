"""The objects of a job on Kubernetes, as a pure function: what `smpkit submit --dry-run` prints and the API gets.

::

    Secret     NAME    the token of the hosts, the values of the job's secrets
    ConfigMap  NAME    spec.json, which hosts read; the packed sources; job.json, for `smpkit resume`
    Service    NAME    headless: gives the first host its address, NAME-0.NAME (a JobSet makes its own)
    Job        NAME    Indexed, one pod for each host; or a JobSet NAME around the Job NAME-hosts-0
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smpkit.config.job import JobConfig
from smpkit.config.kubernetes import Kubernetes, Volume

__all__ = [
    "BASE",
    "CONTAINER",
    "JOBSET",
    "JOB_LABEL",
    "LONGEST_NAME",
    "MANAGED_BY",
    "QUEUE_LABEL",
    "Facts",
    "child_job",
    "first_host",
    "manifests",
]

BASE = "/opt/ml"
CONTAINER = "launcher"
JOBSET = "jobset.x-k8s.io/v1alpha2"
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB_LABEL = "smpkit/job"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
LONGEST_NAME = 48
"""So that `NAME-hosts-0-99999`, the host name of a pod, has at most 63 characters."""

_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_FILES = "/etc/smpkit"
_MESSAGE = "/dev/termination-log"
_MARGIN_SECONDS = 10
"""Between the end of the launcher's grace and SIGKILL."""
_STOPPED, _LOST = 143, 75  # the launcher's exit codes, `smpkit_container.described`


@dataclass(frozen=True)
class Facts:
    """All that the objects are made of."""

    name: str
    namespace: str
    job: JobConfig
    spec: Mapping[str, Any]
    """What hosts read."""
    kept: Mapping[str, Any]
    """The job file, for `smpkit resume`."""
    archive: bytes | None
    """The packed sources; None if the image or a volume has them."""
    secrets: Mapping[str, str]
    jobset: bool
    resumed_from: str | None = None

    @property
    def options(self) -> Kubernetes:
        """The job file's options of Kubernetes."""
        return self.job.backend.kubernetes


def child_job(name: str, *, jobset: bool) -> str:
    """Return the name of the Job whose pods are the hosts."""
    return f"{name}-hosts-0" if jobset else name


def first_host(name: str, *, jobset: bool) -> str:
    """Return the address of the first host in its namespace."""
    return f"{child_job(name, jobset=jobset)}-0.{name}"


def manifests(facts: Facts, token: str) -> list[dict[str, Any]]:
    """Return the objects in the order in which they are created.

    Args:
        token: what the hosts know each other by.
    """
    found = [_secret(facts, token), _config_map(facts)]
    if not facts.jobset:
        found.append(_service(facts))
    return [*found, _jobset(facts) if facts.jobset else _job(facts)]


def _metadata(facts: Facts, *, queued: bool = False) -> dict[str, Any]:
    options = facts.options
    labels = {**options.labels, MANAGED_BY: "smpkit", JOB_LABEL: facts.name}
    if queued and options.queue is not None:
        labels[QUEUE_LABEL] = options.queue
        if options.priority_class is not None:
            labels[_PRIORITY_LABEL] = options.priority_class
    metadata: dict[str, Any] = {"name": facts.name, "namespace": facts.namespace, "labels": labels}
    if facts.resumed_from is not None:
        metadata["annotations"] = {"smpkit/resumed-from": facts.resumed_from}
    return metadata


def _secret(facts: Facts, token: str) -> dict[str, Any]:
    hidden = {"secrets.json": json.dumps(dict(facts.secrets))} if facts.secrets else {}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(facts),
        "type": "Opaque",
        "stringData": {"token": token, **hidden},
    }


def _config_map(facts: Facts) -> dict[str, Any]:
    packed = {} if facts.archive is None else {"sourcedir.tar.gz": base64.b64encode(facts.archive).decode()}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(facts),
        "data": {
            "spec.json": json.dumps(facts.spec, ensure_ascii=False),
            "job.json": json.dumps(facts.kept, ensure_ascii=False),
        },
        **({"binaryData": packed} if packed else {}),
    }


def _service(facts: Facts) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(facts),
        # Launchers ask for the first host's address before its pod is ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: facts.name}},
    }


def _job(facts: Facts) -> dict[str, Any]:
    spec = _job_spec(facts)
    if facts.options.queue is not None:
        spec["suspend"] = True  # Kueue lets it run
    if facts.options.keep_seconds is not None:
        spec["ttlSecondsAfterFinished"] = facts.options.keep_seconds
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(facts, queued=True), "spec": spec}


def _jobset(facts: Facts) -> dict[str, Any]:
    labels = _metadata(facts)["labels"]
    hosts = {"name": "hosts", "replicas": 1, "template": {"metadata": {"labels": labels}, "spec": _job_spec(facts)}}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": facts.name},
        "failurePolicy": {"maxRestarts": 0},  # its Job starts lost hosts again, and keeps the logs of the others
        "replicatedJobs": [hosts],
    }
    if facts.options.queue is not None:
        spec["suspend"] = True
    if facts.options.keep_seconds is not None:
        spec["ttlSecondsAfterFinished"] = facts.options.keep_seconds
    return {"apiVersion": JOBSET, "kind": "JobSet", "metadata": _metadata(facts, queued=True), "spec": spec}


def _job_spec(facts: Facts) -> dict[str, Any]:
    count = facts.spec["nodes"]
    compute = facts.job.compute
    limited = "max_run_seconds" in compute.model_fields_set
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # By index: a host that failed does not end the others. They hear of it from its launcher, say so and end, and
        # their logs stay.
        "backoffLimitPerIndex": facts.options.restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # One of them was asked to stop, so all have saved: they go on from there.
                {"action": "Ignore", "onExitCodes": _exit_codes("In", _STOPPED)},
                {"action": "FailIndex", "onExitCodes": _exit_codes("NotIn", _LOST)},
            ]
        },
        **({"activeDeadlineSeconds": compute.max_run_seconds} if limited else {}),
        "template": _template(facts),
    }


def _exit_codes(operator: str, *codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": operator, "values": list(codes)}


def _template(facts: Facts) -> dict[str, Any]:
    options = facts.options
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds + _MARGIN_SECONDS,
        "automountServiceAccountToken": options.service_account is not None,
        "enableServiceLinks": False,
        "containers": [_container(facts)],
        "volumes": [*_own_volumes(facts), *map(_volume, range(len(options.volumes)), options.volumes)],
    }
    more: dict[str, Any] = {
        "subdomain": None if facts.jobset else facts.name,
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "nodeSelector": dict(options.node_selector),
        "tolerations": [each.model_dump(exclude_none=True) for each in options.tolerations],
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    if options.host_network:
        more |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    metadata: dict[str, Any] = {"labels": _metadata(facts)["labels"]}
    if options.annotations:
        metadata["annotations"] = dict(options.annotations)
    return {"metadata": metadata, "spec": {**spec, **{name: value for name, value in more.items() if value}}}


def _container(facts: Facts) -> dict[str, Any]:
    options = facts.options
    variables = {
        "SMPKIT_BASE_DIR": BASE,
        "SMPKIT_FIRST_HOST": first_host(facts.name, jobset=facts.jobset),
        "SMPKIT_TERMINATION_MESSAGE": _MESSAGE,
        "PYTHONUNBUFFERED": "1",
        "TRAINING_JOB_NAME": facts.name,
    }
    amounts = {
        **({"cpu": options.cpus} if options.cpus else {}),
        **({"memory": options.memory} if options.memory else {}),
        **({options.gpu_resource: str(options.gpus)} if options.gpus else {}),
        **options.resources,
    }
    mounts = [{"name": "ml", "mountPath": BASE}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - in the pod
    mounts.append({"name": "files", "mountPath": _FILES})
    return {
        "name": CONTAINER,
        "image": facts.job.image,
        "command": ["python3", "-m", "smpkit_container", "host", _FILES],
        "workingDir": BASE,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        **({"resources": {"requests": amounts, "limits": amounts}} if amounts else {}),
        "terminationMessagePath": _MESSAGE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *mounts,
            *(
                {"name": f"volume-{index}", "mountPath": each.mount, **({"readOnly": True} if each.read_only else {})}
                for index, each in enumerate(options.volumes)
            ),
        ],
    }


def _own_volumes(facts: Facts) -> list[dict[str, Any]]:
    limit = facts.options.shared_memory
    secret = {"name": facts.name}
    return [
        {"name": "ml", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", **({"sizeLimit": limit} if limit else {})}},
        {"name": "files", "projected": {"sources": [{"configMap": {"name": facts.name}}, {"secret": secret}]}},
    ]


def _volume(index: int, volume: Volume) -> dict[str, Any]:
    kind: dict[str, Any]
    if volume.claim is not None:
        kind = {"persistentVolumeClaim": {"claimName": volume.claim}}
    elif volume.host_path is not None:
        kind = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    elif volume.nfs is not None:
        server, _, path = volume.nfs.partition(":")
        kind = {"nfs": {"server": server, "path": path, **({"readOnly": True} if volume.read_only else {})}}
    else:
        kind = dict(volume.source or {})
    return {"name": f"volume-{index}", **kind}
