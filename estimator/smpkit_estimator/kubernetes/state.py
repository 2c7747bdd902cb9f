"""What a job on Kubernetes is doing, how it ended, and what its pods print: its Job and its pods, read.

Earlier attempts belong to a job while their pods are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from smpkit.config import scheduled as names
from smpkit_estimator.backend import Clock, LogLine, merged
from smpkit_estimator.kubernetes.api import Api, Object
from smpkit_estimator.kubernetes.manifests import CONTAINER, JOB_LABEL, PLACES
from smpkit_estimator.scheduled import status_with_phases
from smpkit_estimator.status import JobFailure, JobStatus, Machines, Phase, failure_of, read_reason

STOPPED_AT = "smpkit/stopped"
"""Annotation of a job that somebody asked to stop: when."""

_INDEX = "batch.kubernetes.io/job-completion-index"
_OF_SIGNALS = 128
"""Exit codes above this one are of signals."""
_RESTARTED = (names.STOPPED, names.LOST)
_TROUBLES = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError"}
)
_EARLY = datetime.fromtimestamp(0, timezone.utc)


def status_of(job: Object, pods: Sequence[Object], now: datetime) -> JobStatus:
    """Return the state of a job; `pods` has those of earlier attempts, too, or none where only the Job was read."""
    metadata = job["metadata"]
    places = json.loads(metadata.get("annotations", {}).get(PLACES, "{}"))
    status, phase, ended = _state(job)
    started = min((time for pod in pods if (time := _started(pod)) is not None), default=None)
    if started is None and ended is not None:  # its pods are gone
        started = _time((job.get("status") or {}).get("startTime"))
    if phase == "Training" and started is None and pods:
        phase = "Starting"
    bare = JobStatus(
        name=metadata["name"],
        arn=f"kubernetes:{metadata['namespace']}/{metadata['name']}",
        status=status,
        phase=phase,
        created=_time(metadata["creationTimestamp"]) or now,
        seen=now,
        ended=ended,
        message=_message(job, pods, phase),
        training_started=started,
        machines=(Machines("pods", "pod", job["spec"].get("completions", 1)),),
        failure=_failure(job, pods) if status == "Failed" else None,
        model_data=places.get("model"),
        checkpoints=places.get("checkpoints"),
    )
    ends = [Phase("Interrupted", f"attempt {n} was interrupted", at, at) for n, at in enumerate(_restarts(pods), 1)]
    return status_with_phases(bare, interrupted=ends)


def _state(job: Object) -> tuple[str, str, datetime | None]:
    """Return a Job's status, its phase, and when it ended."""
    status, metadata = job.get("status") or {}, job["metadata"]
    conditions = {entry["type"]: entry for entry in status.get("conditions") or () if entry["status"] == "True"}
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


def _message(job: Object, pods: Sequence[Object], phase: str) -> str:
    """Say what is being waited for, or where the log went."""
    if phase == "Pending":
        return "waiting for the queue"
    if phase == "Failing":
        return f"hosts that failed: {job['status']['failedIndexes']}; the others have not ended yet"
    if phase in ("Stopped", "MaxRuntimeExceeded"):
        return "Kubernetes deletes the pods of a stopped job, and their logs"
    if phase != "Starting":
        return ""
    for pod in pods:
        waiting = _container(pod).get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _TROUBLES:
            return f"{host_of(pod)}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{host_of(pod)}: {condition.get('message', condition.get('reason', 'not scheduled yet'))}"
    return "waiting for pods"


def _failure(job: Object, pods: Sequence[Object]) -> JobFailure:
    words = "the job failed, and Kubernetes does not say why"
    for condition in job.get("status", {}).get("conditions") or ():
        if condition["type"] == "Failed":
            words = f"Kubernetes says {condition.get('reason', 'Failed')}: {condition.get('message', '')}".rstrip(": ")
    return failure_of(filter(None, map(_reason, pods)), words)


def _reason(pod: Object) -> tuple[datetime, str] | None:
    """Return when and why a pod failed; None if it did not, or is started again."""
    end, status, host = _end(pod), pod.get("status", {}), host_of(pod)
    if end is None:
        if status.get("phase") != "Failed":
            return None
        words = f"{status.get('reason', 'the pod failed')}: {status.get('message', '')}".rstrip(": ")
        return _EARLY, f"{words}\non {host}"
    code, words = end["exitCode"], (end.get("message") or "").strip()
    if code == 0 or code in _RESTARTED:
        return None
    if end.get("reason") == "OOMKilled":
        words = f"the pod ran out of memory (OOMKilled, exit code {code})\non {host}"
    elif not words or (code > _OF_SIGNALS and read_reason(words).rank is None):
        # The launcher left no reason: what there is are the last lines of the log.
        words = f"the container ended with exit code {code}\non {host}\n{words}".rstrip()
    return _time(end.get("finishedAt")) or _EARLY, words


def _restarts(pods: Iterable[Object]) -> list[datetime]:
    """Return when attempts ended that another one followed, as far as their pods are still there."""
    ends: dict[str, list[datetime]] = {}
    for pod in pods:
        end = _end(pod)
        if end is not None and (end["exitCode"] in _RESTARTED or _disrupted(pod)):
            ends.setdefault(host_of(pod), []).append(_time(end.get("finishedAt")) or _EARLY)
    longest: list[datetime] = max(ends.values(), key=len, default=[])
    return sorted(longest)


def _disrupted(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(entry["type"] == "DisruptionTarget" and entry["status"] == "True" for entry in conditions)


def host_of(pod: Object) -> str:
    """Return the name of a pod among the hosts of its job: `pod-0`."""
    labels, annotations = pod["metadata"].get("labels", {}), pod["metadata"].get("annotations") or {}
    return f"pod-{labels.get(_INDEX) or annotations.get(_INDEX, '?')}"


def _container(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((container for container in statuses if container["name"] == CONTAINER), {})


def _started(pod: Object) -> datetime | None:
    state = _container(pod).get("state", {})
    return _time((state.get("running") or state.get("terminated") or {}).get("startedAt"))


def _end(pod: Object) -> Object | None:
    end: Object | None = _container(pod).get("state", {}).get("terminated")
    return end


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).astimezone(timezone.utc) if text else None


# ---- logs ------------------------------------------------------------------------------------------------------------

_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)", re.DOTALL)
_OVERLAP = timedelta(seconds=60)
"""How far the clocks of nodes and this machine may be apart: so much is read again and left out."""


@dataclass
class _Stream:
    host: str
    last: tuple[str, int] = ("", 0)
    """The time of its last line as it was written, and how many lines of that time were read."""
    when: datetime | None = None
    whole: bool = False
    """Whether it was read to its end after its container had ended, or is gone."""


class PodLog:
    """What a job's pods print; each call of `read` returns what is new, sorted by time."""

    def __init__(
        self, api: Api, name: str, clock: Clock, since: datetime | None = None, tail: int | None = None
    ) -> None:
        self._api, self._name, self._clock, self._since, self._tail = api, name, clock, since, tail
        self._streams: dict[str, _Stream] = {}

    def read(self) -> list[LogLine]:
        lines: list[LogLine] = []
        for pod in self._api.list("Pod", f"{JOB_LABEL}={self._name}"):
            name, over = pod["metadata"]["name"], _end(pod) is not None
            if not over and "running" not in _container(pod).get("state", {}):
                continue
            stream = self._streams.setdefault(name, _Stream(host_of(pod)))
            if stream.whole:
                continue
            since = stream.when or self._since
            seconds = None if since is None else (self._clock.now() - since + _OVERLAP).total_seconds()
            data = self._api.log(name, seconds, self._tail)
            lines += self._new(stream, data or b"")
            stream.whole = over or data is None
        self._tail = None
        return merged(lines)

    def _new(self, stream: _Stream, data: bytes) -> list[LogLine]:
        """Return the lines behind the last one that was read."""
        lines, seen = [], 0
        last, count = stream.last
        for text in data.decode("utf-8", "replace").split("\n")[:-1]:
            stamped = _STAMPED.fullmatch(text)
            if stamped is None:
                continue
            stamp = f"{stamped[1]}.{(stamped[2] or '').ljust(9, '0')}{stamped[3]}"  # which sorts as text
            seen += stamp == last
            if stamp < last or (stamp == last and seen <= count):
                continue
            stream.last = (stamp, stream.last[1] + 1 if stamp == stream.last[0] else 1)
            stream.when = datetime.fromisoformat(stamp).astimezone(timezone.utc)
            if self._since is None or stream.when >= self._since:
                lines.append(LogLine(stream.when, stream.host, stamped[4]))
        return lines
