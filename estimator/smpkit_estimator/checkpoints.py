"""Find the newest whole checkpoint at a place, skipping those that were still being written."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from datetime import datetime, timezone
from pathlib import Path

from smpkit.errors import CloudError, UnsupportedError

_NEWEST = "newest"
_UNFINISHED = (".sagemaker-uploading", ".sagemaker-uploaded", ".tmp", ".part", ".partial")


def newest_checkpoint(place: str, files: Mapping[str, datetime], read: Callable[[str], bytes]) -> str | None:
    """Return the place of the newest checkpoint; None if there is none.

    That is the one named by `newest`, which `smp.save_checkpoint` writes last; else the file or folder with the
    newest file in it. Half-written files are no checkpoints.

    Args:
        files: all below the place, with slashes, and when each was written.
        read: returns the content of one.
    """
    times = {name: written for name, written in files.items() if _is_whole(name)}
    entries: dict[str, datetime] = {}
    for name, written in times.items():
        top = name.split("/")[0]
        entries[top] = max(written, entries.get(top, written))
    place = place.rstrip("/")
    if _NEWEST in entries:
        named = read(_NEWEST).decode("utf-8", "replace").strip()
        if named in entries:
            return f"{place}/{named}"
    candidates = [name for name in entries if _can_be_one(name, times)]
    newest = max(candidates, key=lambda name: (entries[name], name), default=None)
    return None if newest is None else f"{place}/{newest}"


def newest_in_folder(place: str, where: str) -> str | None:
    """Return the newest checkpoint in a folder that machines of a cluster mount.

    Args:
        where: whose folder it is, such as `a volume of the cluster`; this machine may not see it.
    """
    folder = Path(place)
    if not folder.is_dir():
        raise UnsupportedError(f"{place} is in {where}, which this machine does not see")
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    try:
        times = {name: datetime.fromtimestamp(path.stat().st_mtime, timezone.utc) for name, path in paths.items()}
        return newest_checkpoint(place, times, lambda name: paths[name].read_bytes())
    except OSError as error:
        raise CloudError(f"cannot read {folder}: {(error.strerror or str(error)).lower()}") from None


def _is_whole(name: str) -> bool:
    parts = name.split("/")
    return all(parts) and not any(part.endswith(_UNFINISHED) or part.startswith(".") for part in parts)


def _can_be_one(name: str, files: Container[str]) -> bool:
    """Tell whether an entry may be a checkpoint; a partial one of ours has an index."""
    if name == _NEWEST or name.startswith("user_content_"):
        return False
    return not name.endswith("_partial") or f"{name}/index.json" in files
