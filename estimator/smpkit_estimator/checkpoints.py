"""Find the newest whole checkpoint in S3, skipping those that were still being written."""

from __future__ import annotations

from collections.abc import Iterable

from smpkit_estimator.cloud import Cloud, S3Object, split_uri

__all__ = ["latest_checkpoint"]

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
    found = [item for item in cloud.objects(f"{root}/") if _is_whole(item.key[len(prefix) :])]
    entries = _entries(found, prefix)
    if _NEWEST in entries:
        named = cloud.read(f"{root}/{_NEWEST}").decode("utf-8", "replace").strip()
        if named in entries:
            return f"{root}/{named}"
    keys = {item.key[len(prefix) :] for item in found}
    candidates = {name: item for name, item in entries.items() if _can_be_one(name, keys)}
    if not candidates:
        return None
    return f"{root}/{max(candidates, key=lambda name: (candidates[name].modified, name))}"


def _can_be_one(name: str, keys: set[str]) -> bool:
    """Tell whether an entry may be a checkpoint; a partial one of ours has an index."""
    if name == _NEWEST or name.startswith("user_content_"):
        return False
    return not name.endswith("_partial") or f"{name}/index.json" in keys


def _is_whole(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and not any(part.endswith(_UNFINISHED) or part.startswith(".") for part in parts)


def _entries(objects: Iterable[S3Object], prefix: str) -> dict[str, S3Object]:
    """Return the files and folders at the top, each with its newest file."""
    entries: dict[str, S3Object] = {}
    for item in objects:
        name = item.key[len(prefix) :].split("/")[0]
        if name not in entries or entries[name].modified < item.modified:
            entries[name] = item
    return entries
