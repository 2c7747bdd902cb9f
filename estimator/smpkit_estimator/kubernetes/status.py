"""What a job on Kubernetes is doing and how it ended: its Job and its pods, in the words that all back ends have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from smpkit_estimator.kubernetes.manifests import CONTAINER
from smpkit_estimator.reason import JobFailure, read_reason
from smpkit_estimator.status import JobStatus, Machines, Phase

__all__ = ["STOPPED_AT", "host_of", "state_of", "status_of", "terminated"]

Object = Mapping[str, Any]

STOPPED_AT = "smpkit/stopped"
"""Annotation of a job that somebody asked to stop: when."""
INDEX = "batch.kubernetes.io/job-completion-index"

_RANKED = re.compile(r"^rank \d+ on ", re.MULTILINE)
_MAX_REASON_CHARACTERS = 1024
_OF_SIGNALS = 128
"""Exit codes above this one are of signals."""
_RESTARTED = (143, 75)
"""Exit codes of launchers that are started again."""
_TROUBLES = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError"}
)


def host_of(pod: Object) -> str:
    """Return the name of a pod among the hosts of its job: `pod-0`."""
    labels, annotations = pod["metadata"].get("labels", {}), pod["metadata"].get("annotations") or {}
    return f"pod-{labels.get(INDEX) or annotations.get(INDEX, '?')}"


def terminated(pod: Object) -> Object | None:
    """Return how a pod's container ended; None if it has not."""
    found: Object | None = _container(pod).get("state", {}).get("terminated")
    return found


def _container(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((each for each in statuses if each["name"] == CONTAINER), {})


def _time(text: str | None) -> datetime | None:
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc)


def state_of(job: Object) -> tuple[str, str, datetime | None]:
    """Return a Job's status, its phase, and when it ended, from the Job alone."""
    status, metadata = job.get("status") or {}, job["metadata"]
    conditions = {each["type"]: each for each in status.get("conditions") or () if each["status"] == "True"}
    asked = STOPPED_AT in (metadata.get("annotations") or {})
    busy = (status.get("active") or 0) + (status.get("terminating") or 0)
    if "Complete" in conditions:
        ended = _time(status.get("completionTime")) or _time(conditions["Complete"]["lastTransitionTime"])
        return "Completed", "Completed", ended
    if "Failed" in conditions:
        ended = _time(conditions["Failed"]["lastTransitionTime"])
        if asked:
            return "Stopped", "Stopped", ended
        if conditions["Failed"].get("reason") == "DeadlineExceeded":
            return "Stopped", "MaxRuntimeExceeded", ended
        return "Failed", "Failed", ended
    if asked and job["spec"].get("suspend") and not busy:
        return "Stopped", "Stopped", _time(metadata["annotations"][STOPPED_AT])
    if asked:
        return "Stopping", "Stopping", None
    if job["spec"].get("suspend"):
        return "InProgress", "Pending", None
    if status.get("failedIndexes"):
        return "InProgress", "Failing", None
    return "InProgress", "Training" if status.get("ready") else "Starting", None


def status_of(name: str, job: Object, pods: Sequence[Object], spec: Mapping[str, Any], now: datetime) -> JobStatus:
    """Return the state of a job.

    Args:
        pods: those of earlier attempts, too.
        spec: what its hosts read.
    """
    status, phase, ended = state_of(job)
    metadata, count = job["metadata"], int(spec["nodes"])
    created = _time(metadata["creationTimestamp"]) or now
    starts = [start for pod in pods if (start := _started(pod)) is not None]
    started = min(starts, default=None)
    if started is None and ended is not None:  # its pods are gone
        started = _time((job.get("status") or {}).get("startTime"))
    if phase == "Training" and started is None:
        phase = "Starting"
    message = _message(job, pods, phase)
    phases = tuple(_phases(pods, phase, message, created, started, ended))
    over = ended is not None
    seconds = round((ended - started).total_seconds()) if ended and started else 0
    places = spec["places"]
    return JobStatus(
        name=name,
        arn=f"kubernetes:{metadata['namespace']}/{metadata['name']}",
        status=status,
        phase=phase,
        message=message,
        phases=phases,
        created=created,
        training_started=started,
        ended=ended,
        seen=now,
        billable_seconds=max(0, seconds) if over else None,
        training_seconds=max(0, seconds) if over else None,
        machines=(Machines("pods", "pod", count),),
        spot=False,
        failure=_failure(job, pods) if status == "Failed" else None,
        model_data=places.get("model"),
        checkpoints=places.get("checkpoints"),
        metrics={},
    )


def _started(pod: Object) -> datetime | None:
    state = _container(pod).get("state", {})
    found = state.get("running") or state.get("terminated") or {}
    return _time(found.get("startedAt"))


def _phases(
    pods: Iterable[Object],
    phase: str,
    message: str,
    created: datetime,
    started: datetime | None,
    ended: datetime | None,
) -> Iterator[Phase]:
    for number, time in enumerate(_restarts(pods), 1):
        yield Phase("Interrupted", f"attempt {number} was interrupted", time, time)
    if started is None:
        yield Phase(phase, message, created, ended)
        return
    yield Phase("Starting", "", created, started)
    yield Phase("Training" if ended else phase, "" if ended else message, started, ended)
    if ended:
        yield Phase(phase, message, ended, ended)


def _restarts(pods: Iterable[Object]) -> list[datetime]:
    """Return when attempts ended that another one followed, as far as their pods are still there."""
    ends: dict[str, list[datetime]] = {}
    for pod in pods:
        end = terminated(pod)
        if end is not None and (end["exitCode"] in _RESTARTED or _disrupted(pod)):
            ends.setdefault(host_of(pod), []).append(_time(end.get("finishedAt")) or datetime.now(timezone.utc))
    most = max((len(times) for times in ends.values()), default=0)
    return next((sorted(times) for times in ends.values() if len(times) == most), [])


def _disrupted(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(each["type"] == "DisruptionTarget" and each["status"] == "True" for each in conditions)


def _message(job: Object, pods: Sequence[Object], phase: str) -> str:
    """Say what is being waited for."""
    if phase == "Pending":
        return "waiting for the queue"
    if phase == "Failing":
        return f"hosts that failed: {job['status']['failedIndexes']}; the others have not ended yet"
    if phase != "Starting":
        return ""
    for pod in pods:
        waiting = _container(pod).get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _TROUBLES:
            return f"{host_of(pod)}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        for each in pod.get("status", {}).get("conditions") or ():
            if each["type"] == "PodScheduled" and each["status"] == "False":
                return f"{host_of(pod)}: {each.get('message', each.get('reason', 'not scheduled yet'))}"
    return "waiting for pods"


def _failure(job: Object, pods: Sequence[Object]) -> JobFailure:
    """Return why a job failed: what the host of the first failing rank left, else another, else Kubernetes's words."""
    told: list[tuple[bool, str, str]] = []
    for pod in pods:
        end, status = terminated(pod), pod.get("status", {})
        host = host_of(pod)
        if end is not None and end["exitCode"] and end["exitCode"] not in _RESTARTED:
            words = (end.get("message") or "").strip()
            if end.get("reason") == "OOMKilled":
                words = f"the pod ran out of memory (OOMKilled, exit code {end['exitCode']})\non {host}"
            elif not words or (end["exitCode"] > _OF_SIGNALS and _RANKED.search(words) is None):
                # The launcher left no reason: what there is are the last lines of the log.
                words = f"the container ended with exit code {end['exitCode']}\non {host}\n{words}".rstrip()
            told.append((_RANKED.search(words) is None, end.get("finishedAt") or "", words))
        elif status.get("phase") == "Failed" and end is None:
            words = f"{status.get('reason', 'the pod failed')}: {status.get('message', '')}".rstrip(": ")
            told.append((True, "", f"{words}\non {host}"))
    if told:
        return read_reason(min(told)[2][:_MAX_REASON_CHARACTERS])
    for each in job.get("status", {}).get("conditions") or ():
        if each["type"] == "Failed":
            return read_reason(
                f"Kubernetes says {each.get('reason', 'Failed')}: {each.get('message', '')}".rstrip(": ")
            )
    return read_reason("the job failed, and Kubernetes does not say why")
