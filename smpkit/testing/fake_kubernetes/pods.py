"""Run the container of a pod as a process of this machine, with its volumes as folders, and keep what it prints."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smpkit.testing.fake_kubernetes.store import Object, Store, now

__all__ = ["RunningPod", "Unmountable"]

_INHERITED = ("HOME", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "PYTEST_CURRENT_TEST", "TMPDIR")
_MAX_MESSAGE_BYTES = 4096


class Unmountable(Exception):
    """A volume of the pod cannot be mounted."""


class RunningPod:
    """A pod whose container runs, or has run."""

    def __init__(
        self,
        store: Store,
        pod: Object,
        folder: Path,
        addresses: Mapping[str, str],
        ended: Callable[[RunningPod], None],
    ) -> None:
        """Start it.

        Args:
            folder: where its volumes are made.
            addresses: of the names that the cluster's DNS would have; they replace them in variables.
            ended: called from a thread when the container has ended.

        Raises:
            Unmountable: with the reason.
        """
        self.pod = pod
        self.deleted = False
        self.disrupted = False
        self.lines: list[tuple[datetime, bytes]] = []
        self._store, self._ended = store, ended
        [self._container] = pod["spec"]["containers"]
        self._message = folder / "message"
        folder.mkdir(parents=True)
        self._message.touch()
        places = {**_mounts(store, pod, folder), self._container["terminationMessagePath"]: str(self._message)}
        command = [_moved(word, places) for word in self._container["command"]]
        given = {each["name"]: _moved(each["value"], places) for each in self._container.get("env", ())}
        variables = {name: addresses.get(value, value) for name, value in given.items()}
        index = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environ = {**inherited, **variables, "JOB_COMPLETION_INDEX": index}
        if command[0] == "python3":
            command[0] = sys.executable
        self.process = subprocess.Popen(
            command, env=environ, cwd=_moved(self._container["workingDir"], places), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._started = now()
        store.change(pod, {"status": self._status("Running", {"running": {"startedAt": self._started}}, ready=True)})
        threading.Thread(target=self._watch, name=pod["metadata"]["name"], daemon=True).start()

    @property
    def index(self) -> int:
        """Which of the job's pods it is."""
        return int(self.pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])

    @property
    def exit_code(self) -> int:
        """How the container ended, as Kubernetes has it."""
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def delete(self, *, disrupted: bool = False) -> None:
        """Ask the container to end, as when the pod is deleted: SIGTERM, and SIGKILL when the grace is over."""
        self.deleted, self.disrupted = True, self.disrupted or disrupted
        grace = self.pod["spec"].get("terminationGracePeriodSeconds", 30)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        timer = threading.Timer(grace, self.kill)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """Kill what runs in the container."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def log(self, since: datetime | None, tail: int | None) -> bytes:
        """Return what it printed, each line behind its time."""
        lines = [line for line in tuple(self.lines) if since is None or line[0] >= since]
        chosen = lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]
        return b"".join(_stamp(time) + b" " + text for time, text in chosen)

    def _watch(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append((datetime.now(timezone.utc), line if line.endswith(b"\n") else line + b"\n"))
        self.process.wait()
        self.kill()
        message = self._message.read_bytes()[:_MAX_MESSAGE_BYTES]
        if (
            not message
            and self.exit_code
            and self._container.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        ):
            message = b"".join(text for _, text in self.lines[-80:])[-2048:]
        end = {"exitCode": self.exit_code, "startedAt": self._started, "finishedAt": now()}
        end |= {"reason": "Completed" if not self.exit_code else "Error", "message": message.decode("utf-8", "replace")}
        phase = "Failed" if self.exit_code else "Succeeded"
        with self._store.lock:
            status = self._status(phase, {"terminated": end}, ready=False)
            if self.disrupted:
                status["conditions"] = [
                    {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
                ]
            self._store.change(self.pod, {"status": {**status}})
            self._ended(self)

    def _status(self, phase: str, state: Mapping[str, Any], *, ready: bool) -> dict[str, Any]:
        one = {"name": self._container["name"], "state": dict(state), "ready": ready, "restartCount": 0}
        return {"phase": phase, "containerStatuses": [one]}


def _stamp(time: datetime) -> bytes:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()


def _moved(text: str, places: Mapping[str, str]) -> str:
    """Replace a path of the pod by that of this machine."""
    for inside, outside in places.items():
        if text == inside or text.startswith(f"{inside}/"):
            return outside + text[len(inside) :]
    return text


def _mounts(store: Store, pod: Object, folder: Path) -> dict[str, str]:
    """Make the volumes; return where each is, by its place in the container."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    [container] = pod["spec"]["containers"]
    found = {}
    for mount in container.get("volumeMounts", ()):
        volume, place = volumes[mount["name"]], folder / mount["name"]
        if "hostPath" in volume:
            place = Path(volume["hostPath"]["path"])
            if not place.is_dir():
                raise Unmountable(f"hostPath type check failed: {place} is not a directory")
        elif "emptyDir" in volume:
            place.mkdir()
        elif "projected" in volume:
            place.mkdir()
            for source in volume["projected"]["sources"]:
                _project(store, pod["metadata"]["namespace"], source, place)
        else:
            raise Unmountable(f'MountVolume.SetUp failed for volume "{mount["name"]}": the fake has none of its kind')
        found[mount["mountPath"]] = str(place)
    return found


def _project(store: Store, namespace: str, source: Mapping[str, Any], place: Path) -> None:
    [(kind, wanted)] = source.items()
    made = store.get({"configMap": "ConfigMap", "secret": "Secret"}[kind], namespace, wanted["name"])
    if made is None:
        raise Unmountable(f'{kind} "{wanted["name"]}" not found')
    data = made.get("data", {})
    plain = {name: text.encode() for name, text in data.items()} if kind == "configMap" else {}
    encoded = made.get("binaryData", {}) if kind == "configMap" else data
    for name, content in {**plain, **{name: base64.b64decode(text) for name, text in encoded.items()}}.items():
        (place / name).write_bytes(content)
