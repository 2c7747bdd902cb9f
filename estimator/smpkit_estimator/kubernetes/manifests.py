"""The objects of a job on Kubernetes, as a pure function: what `smpkit submit --dry-run` prints and the API gets.

::

    Job        NAME    Indexed, one pod for each host; it owns the others, which go with it
    ConfigMap  NAME    hyperparameters.json and inputdataconfig.json, the packed sources; job.json, for `smpkit resume`
    Secret     NAME    the token of the hosts, the values of the job's secrets
    Service    NAME    headless: gives the first host its address, NAME-0.NAME
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from smpkit.config import scheduled as names
from smpkit.config.backend import Volume
from smpkit.config.confidential import HIDDEN, masked
from smpkit.config.job import JobConfig
from smpkit_estimator import scheduled
from smpkit_estimator.hyperparameters import hyperparameters, shown_hyperparameters

CONTAINER = "launcher"
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB_LABEL = "smpkit/job"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PLACES = "smpkit/places"
"""Annotation of the Job: its folders in volumes, as JSON."""
SUBMISSION = "smpkit/submission"
"""Annotation of the Job that no other submission has."""
SOURCES = "sourcedir.tar.gz"
VARIABLE = "variable."
"""Before the name of a secret variable in the Secret."""
LONGEST_NAME = 57
"""So that `NAME-99999`, the host name of a pod, has at most 63 characters."""

_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_BASE = "/opt/ml"
_FILES = "/etc/smpkit"
_MESSAGE = "/dev/termination-log"
_MARGIN_SECONDS = 10
"""Between the end of the launcher's grace and SIGKILL."""


def manifests(
    job: JobConfig, name: str, namespace: str, *, archive: bytes | None, secrets: Mapping[str, str], token: str
) -> list[dict[str, Any]]:
    """Return the objects in the order in which they are created.

    Args:
        archive: the packed sources; None if the image or a volume has them.
        token: what the hosts know each other by.
    """
    options = job.backend.kubernetes
    labels = {**options.labels, MANAGED_BY: "smpkit", JOB_LABEL: name}

    def shell(kind: str, version: str = "v1", **more: Any) -> dict[str, Any]:
        return {
            "apiVersion": version,
            "kind": kind,
            "metadata": {"name": name, "namespace": namespace, "labels": labels, **more},
        }

    code = options.code or f"{_FILES}/{SOURCES}"
    token_file = f"{_FILES}/token"
    sent = hyperparameters(job, submit_directory=code, job_name=name, launcher="torchrun", token_file=token_file)
    files = scheduled.config_files(job, sent)
    texts = {f"{file}.json": json.dumps(content, ensure_ascii=False) for file, content in files.items()}
    packed = {} if archive is None else {"binaryData": {SOURCES: base64.b64encode(archive).decode()}}
    queued = {QUEUE_LABEL: options.queue, _PRIORITY_LABEL: options.priority_class} if options.queue else {}
    places = scheduled.places_in_volumes(job, name)
    objects = [
        {
            **shell(
                "Job",
                "batch/v1",
                labels={**labels, **queued},
                annotations={PLACES: json.dumps(places), SUBMISSION: hashlib.sha256(token.encode()).hexdigest()},
            ),
            "spec": _job_spec(job, name, labels, places, secrets),
        },
        {
            **shell("ConfigMap"),
            "data": {**texts, "job.json": json.dumps(scheduled.job_to_keep(job), ensure_ascii=False)},
            **packed,
        },
        {
            **shell("Secret"),
            "type": "Opaque",
            "stringData": {"token": token, **{f"{VARIABLE}{key}": value for key, value in secrets.items()}},
        },
        {
            **shell("Service"),
            # Launchers ask for the first host's address before its pod is ready.
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: name}},
        },
    ]
    return [scheduled.without_none(manifest) for manifest in objects]


def shown_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without secrets, and the size and digest of the sources in their place."""
    shown: dict[str, Any] = json.loads(json.dumps(manifest))
    if manifest["kind"] == "Job":
        for variable in shown["spec"]["template"]["spec"]["containers"][0]["env"]:
            if "value" in variable:
                variable["value"] = masked(variable["name"], variable["value"])
    if manifest["kind"] == "ConfigMap":
        data = {file: json.loads(text) for file, text in manifest["data"].items()}
        data["hyperparameters.json"] = shown_hyperparameters(data["hyperparameters.json"])
        data["job.json"] = masked("", data["job.json"])
        shown["data"] = {file: json.dumps(content, ensure_ascii=False) for file, content in data.items()}
        for file, text in manifest.get("binaryData", {}).items():
            packed = base64.b64decode(text)
            shown["binaryData"][file] = f"({len(packed):,} bytes, sha256 {hashlib.sha256(packed).hexdigest()})"
    if manifest["kind"] == "Secret":
        shown["stringData"] = dict.fromkeys(manifest["stringData"], HIDDEN)
    return shown


def _job_spec(
    job: JobConfig, name: str, labels: Mapping[str, str], places: Mapping[str, str], secrets: Iterable[str]
) -> dict[str, Any]:
    options, count = job.backend.kubernetes, job.compute.instance_count
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # By index: a host that failed does not end the others. They hear of it from its launcher, say so and end, and
        # their logs stay.
        "backoffLimitPerIndex": options.restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # One of them was asked to stop, so all have saved: they go on from there.
                {"action": "Ignore", "onExitCodes": _exit_codes("In", names.STOPPED)},
                {"action": "FailIndex", "onExitCodes": _exit_codes("NotIn", names.LOST)},
            ]
        },
        "activeDeadlineSeconds": scheduled.limit_of(job),
        "suspend": True if options.queue is not None else None,  # Kueue lets it run
        "ttlSecondsAfterFinished": options.keep_seconds,
        "template": {
            "metadata": {"labels": labels, "annotations": dict(options.annotations) or None},
            "spec": _pod_spec(job, name, places, secrets),
        },
    }


def _exit_codes(operator: str, *codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": operator, "values": list(codes)}


def _pod_spec(job: JobConfig, name: str, places: Mapping[str, str], secrets: Iterable[str]) -> dict[str, Any]:
    options = job.backend.kubernetes
    token = {"name": name, "items": [{"key": "token", "path": "token"}]}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds + _MARGIN_SECONDS,
        "automountServiceAccountToken": options.service_account is not None,
        "enableServiceLinks": False,
        "subdomain": name,
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "nodeSelector": dict(options.node_selector) or None,
        "tolerations": [toleration.model_dump() for toleration in options.tolerations] or None,
        "imagePullSecrets": [{"name": secret} for secret in options.image_pull_secrets] or None,
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if options.host_network else {}),
        "containers": [_container(job, name, places, secrets)],
        "volumes": [
            {"name": "ml", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
            {"name": "files", "projected": {"sources": [{"configMap": {"name": name}}, {"secret": token}]}},
            *(_volume(index, volume) for index, volume in enumerate(options.volumes)),
        ],
    }


def _container(job: JobConfig, name: str, places: Mapping[str, str], secrets: Iterable[str]) -> dict[str, Any]:
    options, count = job.backend.kubernetes, job.compute.instance_count
    variables = {
        **scheduled.host_variables(
            job,
            name,
            base=_BASE,
            machine="kubernetes",
            places={"input/config": _FILES, **places},
            grace_seconds=options.grace_seconds,
            port=options.port,
            interface=options.interface,
        ),
        names.HOSTS: " ".join(f"pod-{index}" for index in range(count)),
        names.FIRST_HOST: f"{name}-0.{name}",
        names.MESSAGE: _MESSAGE,
    }
    # Kubernetes expands `$(NAME)`, and takes `$$` for a dollar sign.
    plain = [{"name": key, "value": value.replace("$", "$$")} for key, value in variables.items()]
    hidden = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": f"{VARIABLE}{key}"}}} for key in secrets
    ]
    gpus = {options.gpu_resource: str(options.gpus)} if options.gpus else {}
    amounts = {"cpu": options.cpus, "memory": options.memory, **gpus, **options.resources}
    return {
        "name": CONTAINER,
        "image": job.image,
        "command": ["python3", "-P", "-m", "smpkit_container", "train"],
        "workingDir": _BASE,
        "env": [*plain, *hidden],
        "resources": {"requests": amounts, "limits": amounts} if any(amounts.values()) else None,
        "terminationMessagePath": _MESSAGE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "ml", "mountPath": _BASE},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - in the pod
            {"name": "files", "mountPath": _FILES},
            *(
                {"name": f"volume-{index}", "mountPath": volume.mount, "readOnly": volume.read_only or None}
                for index, volume in enumerate(options.volumes)
            ),
        ],
    }


def _volume(index: int, volume: Volume) -> dict[str, Any]:
    kind: dict[str, Any]
    if volume.claim is not None:
        kind = {"persistentVolumeClaim": {"claimName": volume.claim}}
    elif volume.host_path is not None:
        kind = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
    elif volume.nfs is not None:
        server, _, path = volume.nfs.partition(":")
        kind = {"nfs": {"server": server, "path": path, "readOnly": volume.read_only or None}}
    else:
        kind = dict(volume.source or {})
    return {"name": f"volume-{index}", **kind}
