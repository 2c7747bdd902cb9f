"""Find the newest whole checkpoint at a place, skipping those that were still being written."""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime

from smpkit_estimator.files import Files

__all__ = ["latest_checkpoint"]

_NEWEST = "newest"
_UNFINISHED = (".sagemaker-uploading", ".sagemaker-uploaded", ".tmp", ".part", ".partial")


def latest_checkpoint(files: Files) -> str | None:
    """Return the place of the newest checkpoint; None if there is none.

    That is the one named by `newest`, which `smp.save_checkpoint` writes last; else the file or folder with the
    newest file in it. Half-written files are no checkpoints.
    """
    times = {name: written for name, written in files.list().items() if _is_whole(name)}
    entries: dict[str, datetime] = {}
    for name, written in times.items():
        top = name.split("/")[0]
        entries[top] = max(written, entries.get(top, written))
    if _NEWEST in entries:
        named = files.read(_NEWEST).decode("utf-8", "replace").strip()
        if named in entries:
            return f"{files.place}/{named}"
    candidates = [name for name in entries if _can_be_one(name, times)]
    newest = max(candidates, key=lambda name: (entries[name], name), default=None)
    return None if newest is None else f"{files.place}/{newest}"


def _is_whole(name: str) -> bool:
    parts = name.split("/")
    return all(parts) and not any(part.endswith(_UNFINISHED) or part.startswith(".") for part in parts)


def _can_be_one(name: str, files: Container[str]) -> bool:
    """Tell whether an entry may be a checkpoint; a partial one of ours has an index."""
    if name == _NEWEST or name.startswith("user_content_"):
        return False
    return not name.endswith("_partial") or f"{name}/index.json" in files
