"""Find the newest whole checkpoint at a place, skipping those that were still being written, and copy it elsewhere."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from smpkit.errors import CheckpointError
from smpkit_estimator.files import Files, copied

__all__ = ["Transfer", "latest_checkpoint", "plan_transfer"]

_NEWEST = "newest"
_UNFINISHED = (".sagemaker-uploading", ".sagemaker-uploaded", ".tmp", ".part", ".partial")


def latest_checkpoint(files: Files) -> str | None:
    """Return the place of the newest checkpoint; None if there is none.

    That is the one named by `newest`, which `smp.save_checkpoint` writes last; else the file or folder with the
    newest file in it. Half-written files are no checkpoints.
    """
    name = _newest(files)
    return None if name is None else f"{files.place}/{name}"


@dataclass(frozen=True)
class Transfer:
    """One checkpoint that is to be copied, and what of it the other place lacks."""

    source: Files
    target: Files
    name: str
    files: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        count = f"{len(self.files)} file{'s' * (len(self.files) != 1)}, {self.num_bytes / 2**20:,.1f} MiB"
        return f"checkpoint `{self.name}` ({count}) from {self.source.place} to {self.target.place}"

    def run(self) -> None:
        """Copy it; it becomes the newest one there when it is whole."""
        for name in self.files:
            copied(self.source, self.target, name)
        self.target.write(_NEWEST, io.BytesIO(self.name.encode()))


def plan_transfer(source: Files, target: Files) -> Transfer | None:
    """Decide how the newest checkpoint comes to another place; None if there is none.

    Raises:
        CheckpointError: there is another one of its name.
    """
    name = _newest(source)
    if name is None:
        return None
    here, there = source.list(), target.list()
    parts = [each for each in here if _is_whole(each) and each.split("/")[0] in (name, f"user_content_{name}")]
    missing = [each for each in sorted(parts) if each not in there]
    for each in sorted(set(parts) - set(missing)):
        if here[each].size != there[each].size or _digest(source, each) != _digest(target, each):
            message = f"there is another checkpoint `{name}` at {target.place}"
            raise CheckpointError(message, hint="give the job file a place of its own in `checkpoints`")
    return Transfer(source, target, name, tuple(missing), sum(here[each].size for each in missing))


def _digest(files: Files, name: str) -> bytes:
    digest = _Digest()
    files.read(name, digest)
    return digest.found.digest()


class _Digest:
    """Takes in a file and keeps its digest."""

    def __init__(self) -> None:
        self.found = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.found.update(data)


def _newest(files: Files) -> str | None:
    """Return the name of the newest checkpoint."""
    times = {name: each.modified for name, each in files.list().items() if _is_whole(name)}
    entries = _entries(times.items())
    if _NEWEST in entries:
        file = io.BytesIO()
        files.read(_NEWEST, file)
        named = file.getvalue().decode("utf-8", "replace").strip()
        if named in entries:
            return named
    candidates = {name: modified for name, modified in entries.items() if _can_be_one(name, times)}
    return max(candidates, key=lambda name: (candidates[name], name), default=None)


def _can_be_one(name: str, keys: Mapping[str, object]) -> bool:
    """Tell whether an entry may be a checkpoint; a partial one of ours has an index."""
    if name == _NEWEST or name.startswith("user_content_"):
        return False
    return not name.endswith("_partial") or f"{name}/index.json" in keys


def _is_whole(name: str) -> bool:
    parts = name.split("/")
    return all(parts) and not any(part.endswith(_UNFINISHED) or part.startswith(".") for part in parts)


def _entries(files: Iterable[tuple[str, datetime]]) -> dict[str, datetime]:
    """Return the files and folders at the top, each with the time of its newest file."""
    entries: dict[str, datetime] = {}
    for path, modified in files:
        name = path.split("/")[0]
        entries[name] = max(modified, entries.get(name, modified))
    return entries
