"""Find the newest whole checkpoint in S3 or in a folder, skipping those that were still being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

from smpkit_estimator.cloud import Cloud, split_uri

__all__ = ["latest_checkpoint", "latest_checkpoint_in"]

_NEWEST = "newest"
_UNFINISHED = (".sagemaker-uploading", ".sagemaker-uploaded", ".tmp", ".part", ".partial")


def latest_checkpoint(cloud: Cloud, uri: str) -> str | None:
    """Return the S3 URI of the newest checkpoint below `uri`; None if there is none.

    That is the one named by `newest`, which `smp.save_checkpoint` writes last; else the file or folder with the
    newest file in it. Half-written files are no checkpoints.
    """
    root = uri.rstrip("/")
    prefix = split_uri(root)[1].rstrip("/")
    prefix += "/" if prefix else ""
    files = {item.key[len(prefix) :]: item.modified for item in cloud.objects(f"{root}/")}
    name = _newest(files, lambda: cloud.read(f"{root}/{_NEWEST}"))
    return None if name is None else f"{root}/{name}"


def latest_checkpoint_in(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, by the same rules; None if there is none."""
    files = {
        str(path.relative_to(folder)): datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        for path in folder.rglob("*")
        if path.is_file()
    }
    name = _newest(files, (folder / _NEWEST).read_bytes)
    return None if name is None else folder / name


def _newest(files: dict[str, datetime], read_named: Callable[[], bytes]) -> str | None:
    """Return the name of the newest checkpoint.

    Args:
        files: every file below the place, by its path from there, with the time of its last change.
        read_named: returns the content of the file `newest`.
    """
    times = {name: modified for name, modified in files.items() if _is_whole(name)}
    entries = _entries(times.items())
    if _NEWEST in entries:
        named = read_named().decode("utf-8", "replace").strip()
        if named in entries:
            return named
    candidates = {name: modified for name, modified in entries.items() if _can_be_one(name, set(times))}
    return max(candidates, key=lambda name: (candidates[name], name), default=None)


def _can_be_one(name: str, keys: set[str]) -> bool:
    """Tell whether an entry may be a checkpoint; a partial one of ours has an index."""
    if name == _NEWEST or name.startswith("user_content_"):
        return False
    return not name.endswith("_partial") or f"{name}/index.json" in keys


def _is_whole(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and not any(part.endswith(_UNFINISHED) or part.startswith(".") for part in parts)


def _entries(files: Iterable[tuple[str, datetime]]) -> dict[str, datetime]:
    """Return the files and folders at the top, each with the time of its newest file."""
    entries: dict[str, datetime] = {}
    for path, modified in files:
        name = path.split("/")[0]
        entries[name] = max(modified, entries.get(name, modified))
    return entries
