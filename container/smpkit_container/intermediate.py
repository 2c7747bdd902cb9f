"""Upload what the script writes to `output/intermediate` while the job runs: SageMaker uploads results at its end."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from smpkit.errors import ConfigError, LaunchError, Problem
from smpkit_container.environment import Environment
from smpkit_container.s3 import uploader

__all__ = ["S3_OUTPUT", "LiveUpload", "live_upload"]

S3_OUTPUT = "sagemaker_s3_output"
"""Hyperparameter: the S3 URI below which a job has its results; the one that AWS's toolkit reads."""

_LOOK_SECONDS = 1.0

_State = tuple[int, int]
"""Size and time of the last change, in nanoseconds."""


class LiveUpload:
    """Uploads files of a folder from a thread, each when it has not changed for one look, and again when it changed.

    Files that are deleted stay in S3. An upload that fails is told once and tried again at the file's next change and
    at the end; it never fails the job.
    """

    def __init__(
        self,
        folder: Path,
        uri: str,
        send: Callable[[Path, str], None],
        say: Callable[[str], None],
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        """Start to watch.

        Args:
            folder: whose files are uploaded, those of its folders too.
            uri: where the folder is in S3, without a slash at its end.
            send: uploads a file to a URI; raises LaunchError.
        """
        self._folder, self._uri, self._send, self._say = folder, uri, send, say
        self._look_seconds = look_seconds
        self._seen: dict[Path, _State] = {}
        self._tried: dict[Path, _State] = {}
        self._failed: set[Path] = set()
        self._told = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="live upload", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Upload what is left; after `seconds` say that it is not all there."""
        self._closing.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"warning: {self._folder} was not uploaded completely within {seconds:g} s to {self._uri}")
        elif self._failed:
            names = ", ".join(sorted(str(path.relative_to(self._folder)) for path in self._failed)[:5])
            self._say(f"warning: files were not uploaded ({len(self._failed)}) to {self._uri}, such as {names}")

    def _watch(self) -> None:
        while not self._closing.wait(self._look_seconds):
            self._look(settled=True)
        for path in self._failed:
            self._tried.pop(path, None)
        self._look(settled=False)

    def _look(self, *, settled: bool) -> None:
        """Upload what changed since its last upload; with `settled`, not what changed since the last look."""
        found = self._files()
        for path, state in found.items():
            if self._tried.get(path) != state and (not settled or self._seen.get(path) == state):
                self._upload(path, state)
        self._seen = found

    def _files(self) -> dict[Path, _State]:
        found: dict[Path, _State] = {}
        for folder, _, names in os.walk(self._folder):
            for path in (Path(folder, name) for name in names):
                try:
                    state = path.stat()
                except OSError:  # it was deleted meanwhile
                    continue
                if stat.S_ISREG(state.st_mode):
                    found[path] = (state.st_size, state.st_mtime_ns)
        return found

    def _upload(self, path: Path, state: _State) -> None:
        self._tried[path] = state
        try:
            self._send(path, f"{self._uri}/{path.relative_to(self._folder).as_posix()}")
        except LaunchError as error:
            if path.exists():  # else the script deleted it meanwhile
                self._failed.add(path)
                if not self._told:
                    self._told = True
                    self._say(f"warning: {error}")
        else:
            self._failed.discard(path)


def live_upload(environment: Environment, say: Callable[[str], None]) -> LiveUpload | None:
    """Start to upload `output/intermediate`, if the job asks for it; None if not, or if the platform does it.

    To be called before the folder is made: AWS's toolkit takes one that is there as the platform's own.

    Raises:
        ConfigError: the job names a place that is not in S3.
    """
    place, folder = environment.framework.get(S3_OUTPUT), environment.folders.intermediate
    if not place or str(place).startswith("file:") or folder.exists():
        return None
    if not str(place).startswith("s3://"):
        problem = Problem(("hyperparameters", S3_OUTPUT), f"must be an S3 URI, got {place!r}")
        raise ConfigError([problem], subject="job files")
    folder.mkdir(parents=True)
    parts = [str(place).rstrip("/"), environment.job_name, "output/intermediate"]
    return LiveUpload(folder, "/".join(part for part in parts if part), uploader(environment), say)
