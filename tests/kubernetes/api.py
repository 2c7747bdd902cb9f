"""A namespace of a cluster that is a dict, behind `Api`; its pods are launchers of this machine.

It copies what the processes do: it starts them once, tells how they ended and what they printed, passes a stop on. What
only a cluster can show is not played: failure policies, restarts, evictions, queues, rights. `test_real_cluster.py` is
for somebody who has one.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from smpkit.errors import CloudError, UnreachableError


def now() -> str:
    return datetime.now(timezone.utc).isoformat()


class Pod:
    """One launcher: its process, and what it has printed."""

    def __init__(self, name: str, index: int, manifest: Mapping[str, Any], files: Path, folder: Path) -> None:
        [container] = manifest["spec"]["template"]["spec"]["containers"]
        self.name, self.labels = name, {"batch.kubernetes.io/job-completion-index": str(index)}
        self.started, self.finished, self.message = now(), "", folder / "message"
        folder.mkdir()
        self.message.touch()
        environ = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
        for each in container["env"]:
            if "value" in each:
                value = each["value"].replace("$$", "$").replace("/etc/smpkit", str(files))
                environ[each["name"]] = value.replace("/opt/ml", str(folder / "ml"))
            else:
                environ[each["name"]] = (files / each["valueFrom"]["secretKeyRef"]["key"]).read_text()
        environ |= {"SMPKIT_FIRST_HOST": "127.0.0.1", "SMPKIT_TERMINATION_MESSAGE": str(self.message)}
        command = [sys.executable if word == "python3" else word for word in container["command"]]
        self.lines: list[bytes] = []
        self.process = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f000Z ")
                self.lines.append(stamp.encode() + line)
        self.process.wait()
        self.finished = now()

    @property
    def over(self) -> bool:
        return self.finished != ""

    def shown(self) -> dict[str, Any]:
        """The pod as the API has it."""
        state: dict[str, Any] = {"running": {"startedAt": self.started}}
        if self.over:
            code = self.process.returncode
            text = self.message.read_text() or b"".join(line[31:] for line in self.lines[-20:]).decode()
            times = {"startedAt": self.started, "finishedAt": self.finished}
            state = {"terminated": {"exitCode": code if code >= 0 else 128 - code, "message": text, **times}}
        status = {"containerStatuses": [{"name": "launcher", "state": state}]}
        return {"metadata": {"name": self.name, "labels": self.labels}, "status": status}


class Cluster:
    """What `smpkit_estimator.kubernetes.backend` uses of `Api`."""

    host = "https://cluster.example.com"

    def __init__(self, folder: Path, namespace: str = "team") -> None:
        self.namespace, self._folder = namespace, folder
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.refused: set[str] = set()
        """Kinds that nobody may create."""
        self.lost: set[str] = set()
        """Kinds whose next answer is lost."""
        self.dry: list[str] = []

    def version(self) -> str:
        return "v1.34.0"

    def create(self, manifest: Mapping[str, Any], *, dry: bool = False) -> Mapping[str, Any]:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in self.refused:
            raise CloudError(f"cannot create the {kind} `{name}`: {kind} is forbidden")
        if dry:
            self.dry.append(kind)
            return manifest
        if (kind, name) in self.objects:
            raise CloudError(f"cannot create the {kind} `{name}`: it already exists")
        made = json.loads(json.dumps(manifest))
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if kind == "Secret":
            hidden = made.pop("stringData").items()
            made["data"] = {key: base64.b64encode(text.encode()).decode() for key, text in hidden}
        self.objects[kind, name] = made
        if kind == "Service":  # the last one
            self._start(name)
        if kind in self.lost:
            self.lost.remove(kind)
            raise UnreachableError(f"cannot create the {kind} `{name}`: no answer")
        return made

    def _start(self, name: str) -> None:
        job, files = self.objects["Job", name], self._folder / name
        if job["spec"].get("suspend"):
            return
        files.mkdir()
        sent = self.objects["ConfigMap", name]
        for key, text in sent["data"].items():
            (files / key).write_text(text.replace("/etc/smpkit", str(files)))
        encoded = {**sent.get("binaryData", {}), **self.objects["Secret", name]["data"]}
        for key, text in encoded.items():
            (files / key).write_bytes(base64.b64decode(text))
        count = range(job["spec"]["completions"])
        self.pods[name] = [Pod(f"{name}-{n}-x", n, job, files, files / f"pod-{n}") for n in count]

    def read(self, kind: str, name: str) -> Mapping[str, Any] | None:
        found = self.objects.get((kind, name))
        if found is None or kind != "Job":
            return found
        pods = self.pods.get(name, [])
        running = sum(not pod.over for pod in pods)
        status: dict[str, Any] = {"active": running, "ready": running}
        if pods and not running:
            asked = found["spec"].get("activeDeadlineSeconds") == 1
            good = not any(pod.process.returncode for pod in pods)
            kind, reason = ("Complete", "") if good and not asked else ("Failed", "FailedIndexes")
            reason = "DeadlineExceeded" if asked else reason
            last = max(pod.finished for pod in pods)
            status = {"conditions": [{"type": kind, "status": "True", "reason": reason, "lastTransitionTime": last}]}
        return {**found, "status": status}

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> Mapping[str, Any]:
        found = self.objects[kind, name]
        found["metadata"].setdefault("annotations", {}).update(change["metadata"].get("annotations", {}))
        found["spec"] |= change.get("spec", {})
        for pod in self.pods.get(name, []) if "spec" in change else ():
            pod.process.send_signal(signal.SIGTERM)
        return found

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, and those that it owns."""
        uid = self.objects.pop((kind, name))["metadata"]["uid"]
        for key, each in [*self.objects.items()]:
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ())):
                del self.objects[key]

    def list(self, kind: str, selector: str) -> Iterator[Mapping[str, Any]]:
        if kind == "Job":
            yield from (self.read(*key) or {} for key in self.objects if key[0] == "Job")
            return
        name = selector.rpartition("=")[2]
        job = self.read("Job", name) or {}
        if "conditions" in job.get("status", {}) and job["spec"].get("activeDeadlineSeconds") == 1:
            return  # Kubernetes deletes the pods of a job that is over its limit
        yield from (pod.shown() for pod in self.pods.get(name, ()))

    def log(self, pod: str, since_seconds: float | None = None, tail: int | None = None) -> bytes | None:
        [found] = [each for pods in self.pods.values() for each in pods if each.name == pod]
        if found.over:
            found.reader.join()
        lines = tuple(found.lines)
        if since_seconds is not None:
            first = (datetime.now(timezone.utc) - timedelta(seconds=since_seconds)).isoformat()
            lines = tuple(line for line in lines if line.decode() >= first)
        return b"".join(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :])

    def close(self) -> None:
        for pod in (pod for pods in self.pods.values() for pod in pods):
            pod.process.kill()
            pod.reader.join(10)
