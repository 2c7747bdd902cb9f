"""What Kubernetes does with Jobs, as far as the fake does it: a pod for each index, failures, limits, eviction."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smpkit.testing.fake_kubernetes.pods import RunningPod, Unmountable
from smpkit.testing.fake_kubernetes.store import Object, Store, now

__all__ = ["Controller"]

_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass
class _Course:
    """How far a Job has come."""

    job: Object
    pods: dict[int, RunningPod] = field(default_factory=dict)
    """Those that run, by index."""
    succeeded: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    counted: dict[int, int] = field(default_factory=dict)
    timer: threading.Timer | None = None
    expired: bool = False

    @property
    def over(self) -> bool:
        return any(each["type"] in ("Complete", "Failed") for each in self.job.get("status", {}).get("conditions", ()))


class Controller:
    """Runs the pods of all Jobs in the store. Everything happens under the store's lock."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._courses: dict[tuple[str, str], _Course] = {}
        self.runs: dict[str, RunningPod] = {}
        """Every pod that was started, by its name."""

    def sync(self, job: Object) -> None:
        """Do what a new or changed Job asks for."""
        metadata = job["metadata"]
        with self._store.lock:
            course = self._courses.setdefault((metadata["namespace"], metadata["name"]), _Course(job))
            if course.over:
                return
            if job["spec"].get("suspend"):
                self._end_pods(course)
                self._note(course)
                return
            if "startTime" not in job.get("status", {}):
                self._store.change(job, {"status": {"startTime": now()}})
            self._limit(course)
            self._fill(course)

    def forget(self, job: Object) -> None:
        """Kill the pods of a Job that was deleted."""
        metadata = job["metadata"]
        course = self._courses.pop((metadata["namespace"], metadata["name"]), None)
        if course is not None:
            course.expired = True
            for run in course.pods.values():
                run.kill()

    def evict(self, pod: str) -> None:
        """Take a pod from its node, as a drain or a preemption does."""
        with self._store.lock:
            self.runs[pod].delete(disrupted=True)

    def close(self) -> None:
        """Kill everything."""
        with self._store.lock:
            for course in self._courses.values():
                course.expired = True
                if course.timer is not None:
                    course.timer.cancel()
        for run in self.runs.values():
            run.kill()
        for run in self.runs.values():
            run.process.wait(10)

    def _limit(self, course: _Course) -> None:
        if course.timer is not None:
            course.timer.cancel()
            course.timer = None
        seconds = course.job["spec"].get("activeDeadlineSeconds")
        if seconds is not None:
            course.timer = threading.Timer(seconds, self._expire, [course])
            course.timer.daemon = True
            course.timer.start()

    def _expire(self, course: _Course) -> None:
        with self._store.lock:
            if course.over or course.expired:
                return
            course.expired = True
            self._end_pods(course)
            self._finish(course)

    def _end_pods(self, course: _Course) -> None:
        for run in course.pods.values():
            if not run.deleted:
                run.delete()

    def _fill(self, course: _Course) -> None:
        """Start the pods that are missing."""
        for index in range(course.job["spec"]["completions"]):
            if index in course.succeeded or index in course.failed or index in course.pods:
                continue
            pod = self._pod(course.job, index)
            names = self._names(course.job)
            folder = self._folder / pod["metadata"]["name"]
            try:
                run = RunningPod(self._store, pod, folder, names, self._ended)
            except Unmountable as error:
                waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": str(error)}}
                status = {"phase": "Pending", "containerStatuses": [{"name": "launcher", "state": waiting}]}
                self._store.change(pod, {"status": status})
                return
            self.runs[pod["metadata"]["name"]] = course.pods[index] = run
        self._note(course)

    def _pod(self, job: Object, index: int) -> Object:
        metadata, template = job["metadata"], job["spec"]["template"]
        label = {_INDEX: str(index), "batch.kubernetes.io/job-name": metadata["name"]}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
        name = f"{metadata['name']}-{index}"
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-{secrets.token_hex(3)}",
                "labels": {**template["metadata"].get("labels", {}), **label},
                "annotations": {**template["metadata"].get("annotations", {}), _INDEX: str(index)},
                "ownerReferences": [owner],
            },
            "spec": {**template["spec"], "hostname": name},
            "status": {"phase": "Pending"},
        }
        made = self._store.add(manifest, metadata["namespace"])
        assert made is not None
        return made

    def _names(self, job: Object) -> dict[str, str]:
        """Return the addresses of the names that the cluster's DNS would have for the pods of a Job."""
        subdomain = job["spec"]["template"]["spec"].get("subdomain", "")
        count = job["spec"]["completions"]
        return {f"{job['metadata']['name']}-{index}.{subdomain}": "127.0.0.1" for index in range(count)}

    def _ended(self, run: RunningPod) -> None:
        """Decide what follows from the end of a pod; called under the lock."""
        [owner] = run.pod["metadata"]["ownerReferences"]
        place = (run.pod["metadata"]["namespace"], owner["name"])
        course = self._courses.get(place)
        if course is None:
            return
        course.pods.pop(run.index, None)
        if run.deleted:  # it was kept until its end was known
            self._store.remove("Pod", place[0], run.pod["metadata"]["name"])
        if not run.exit_code:
            course.succeeded.add(run.index)
        elif not course.expired and not (run.deleted and not run.disrupted):
            self._judge(course, run)
        if course.expired or len(course.succeeded | course.failed) == course.job["spec"]["completions"]:
            self._finish(course)
        elif not course.job["spec"].get("suspend"):
            self._fill(course)
        self._note(course)

    def _judge(self, course: _Course, run: RunningPod) -> None:
        """Apply the pod failure policy: the first rule that fits."""
        action = next((rule["action"] for rule in _rules(course.job) if _fits(rule, run)), "Count")
        if action == "FailIndex":
            course.failed.add(run.index)
        elif action == "Count":
            course.counted[run.index] = course.counted.get(run.index, 0) + 1
            if course.counted[run.index] > course.job["spec"]["backoffLimitPerIndex"]:
                course.failed.add(run.index)

    def _finish(self, course: _Course) -> None:
        if course.pods or course.over:
            return
        if course.timer is not None:
            course.timer.cancel()
        kind, reason, message = "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
        if course.expired:
            kind, reason, message = "Failed", "DeadlineExceeded", "Job was active longer than specified deadline"
        elif course.failed:
            kind, reason, message = "Failed", "FailedIndexes", "Job has failed indexes"
        ended = {"completionTime": now()} if kind == "Complete" else {}
        condition = {"type": kind, "reason": reason, "message": message}
        condition |= {"status": "True", "lastTransitionTime": now()}
        self._store.change(course.job, {"status": {"conditions": [condition], **ended}})
        self._note(course)

    def _note(self, course: _Course) -> None:
        """Write the numbers into the Job's status."""
        alive = [run for run in course.pods.values() if not run.deleted]
        numbers: dict[str, Any] = {
            "active": len(alive),
            "ready": len(alive),
            "terminating": len(course.pods) - len(alive),
            "succeeded": len(course.succeeded),
            "failed": len(course.failed),
        }
        if course.failed:
            numbers["failedIndexes"] = ",".join(map(str, sorted(course.failed)))
        self._store.change(course.job, {"status": numbers})


def _rules(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = job["spec"].get("podFailurePolicy", {}).get("rules", [])
    return found


def _fits(rule: Mapping[str, Any], run: RunningPod) -> bool:
    if "onPodConditions" in rule:
        return run.disrupted
    listed = run.exit_code in rule["onExitCodes"]["values"]
    return bool(listed) == bool(rule["onExitCodes"]["operator"] == "In")
