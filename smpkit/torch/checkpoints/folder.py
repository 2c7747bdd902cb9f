"""The files of checkpoints: their names, how a checkpoint appears completely or not at all, which is the newest.

::

    path/
      {tag}_partial/               one rank's part per file; appears by one rename, with everything in it
          model_{pp}_{tp}.pt  optimizer_{pp}_{tp}.pt  fp16_states_{pp}_{tp}.pt  user_content.pt
          pieces.json              what each file holds of the whole model
          index.json               degrees, sizes, partition, and which save it was
      {tag}                        full: the model's state dict in one file
      user_content_{tag}           full: the script's own content
      newest                       name of the newest, `{tag}_partial` or `{tag}`
      .{name}.{save id}.tmp        being written, or left over from a job that died; never read
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from smpkit.errors import CheckpointError, UsageError

__all__ = [
    "INDEX",
    "NEWEST",
    "PARTIAL",
    "Index",
    "as_checkpoint_error",
    "atomic_write",
    "check_tag",
    "complete_partials",
    "find_damage",
    "fsync_write",
    "new_save_id",
    "publish_folder",
    "read_index",
    "read_newest",
    "remove_leftovers",
    "staging_folder",
    "write_index",
]

INDEX: Final = "index.json"
NEWEST: Final = "newest"
PARTIAL: Final = "_partial"
_FORMAT: Final = 2
_TEMPORARY: Final = re.compile(r"\.(?P<name>.+)\.(?P<save_id>[0-9a-f]{16})(?P<old>\.old)?\.tmp")


@dataclass(frozen=True)
class Index:
    """Describes a partial checkpoint.

    Args:
        tag: the script's name for it.
        save_id: of the save that wrote it.
        order: grows by one with each save to the same folder; a time would depend on the clocks of restarted hosts.
        degrees: pipeline, virtual pipeline and tensor degree it was saved with.
        smpkit: version that wrote it.
        files: name -> size in bytes.
        elsewhere: files of this checkpoint on the file systems of other hosts -> where.
        format: version of this layout.
        random: seed and step of the streams of random numbers, so that dropout continues exactly.
        partition: the assignment of units to pipeline ranks (`Assignment.to_json`); None before the first step.
    """

    tag: str
    save_id: str
    order: int
    degrees: Mapping[str, int]
    smpkit: str
    files: Mapping[str, int] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    format: int = _FORMAT
    random: Mapping[str, int] = field(default_factory=dict)
    partition: str | None = None


def check_tag(tag: object) -> None:
    """Raise UsageError unless `tag` can be a file name that smpkit does not use itself."""
    if not isinstance(tag, str) or not re.fullmatch(r"[^/\0.][^/\0]*", tag) or tag == NEWEST:
        raise UsageError(
            f"{tag!r} cannot be the tag of a checkpoint",
            hint="use a plain name such as `step_100`, without `/`",
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def fsync_write(path: Path, write: Callable[[BinaryIO], object]) -> int:
    """Write a new file and flush it to the disk; return its size in bytes."""
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> int:
    """Replace `path` by a new file in one rename; return its size. Readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{new_save_id()}.tmp")  # in the same folder: a rename is atomic there
    try:
        # Flush before the rename, or after a crash the new name may be there without its content.
        size = fsync_write(temporary, write)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return size


def sync_folder(folder: Path) -> None:
    """Flush renames in `folder` to the disk, where the file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def new_save_id() -> str:
    """Return a random id for one save."""
    return secrets.token_hex(8)


def staging_folder(path: Path, name: str, save_id: str) -> Path:
    """Return where `path / name` is written before it is published."""
    return path / f".{name}.{save_id}.tmp"


def write_index(folder: Path, index: Index) -> None:
    """Write the index of a checkpoint."""
    text = json.dumps(asdict(index), indent=1)
    fsync_write(folder / INDEX, lambda file: file.write(text.encode()))
    sync_folder(folder)


def publish_folder(staged: Path, target: Path) -> None:
    """Rename a complete folder to its final name, replacing an older one of that name.

    Does nothing if `staged` is gone because another host has published it on the same file system.
    """
    if not staged.exists():
        return
    # A folder cannot be replaced in one rename. If the job dies in between, `remove_leftovers` puts the old one back.
    old = staged.with_suffix(".old.tmp")
    with contextlib.suppress(FileNotFoundError):
        target.rename(old)
    try:
        staged.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(path: Path, save_id: str) -> None:
    """Remove the leftovers in `path` of saves that died, except those of the save with `save_id`.

    A checkpoint whose replacement was interrupted (moved away, and the new one not in place) is put back.
    """
    for leftover in path.glob(".*.tmp"):
        ours = _TEMPORARY.fullmatch(leftover.name)
        if ours is None or ours["save_id"] == save_id:
            continue
        if ours["old"] and not (path / ours["name"]).exists():
            leftover.rename(path / ours["name"])
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Index:
    """Return the index of a partial checkpoint; raise CheckpointError if it is missing or cannot be read."""
    try:
        index = Index(**json.loads((folder / INDEX).read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {INDEX}") from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error}") from error
    if index.format != _FORMAT:
        raise CheckpointError(f"{folder} has format {index.format}, this version reads {_FORMAT}", hint="update smpkit")
    return index


def find_damage(folder: Path, index: Index) -> str | None:
    """Return what is wrong with the files of a checkpoint; None if they are complete."""
    for name, size in index.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{folder / name} is missing"
        if found != size:
            return f"{folder / name} has {found} bytes instead of {size}"
    return None


def complete_partials(path: Path) -> list[tuple[str, Index]]:
    """Return the folders of complete partial checkpoints in `path` and their indices, newest first."""
    found = []
    for folder in path.glob(f"*{PARTIAL}"):
        with contextlib.suppress(CheckpointError):
            index = read_index(folder)
            if find_damage(folder, index) is None:
                found.append((folder.name, index))
    return sorted(found, key=lambda item: item[1].order, reverse=True)


def read_newest(path: Path) -> str | None:
    """Return the name in `newest`; None if there is no such file or no valid name in it."""
    try:
        name = (path / NEWEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name and "/" not in name and not name.startswith(".") else None


@contextlib.contextmanager
def as_checkpoint_error(doing: str) -> Iterator[None]:
    """Turn errors of the operating system (a full disk, no permission) into CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing}: {error.strerror or error}") from error
    except RuntimeError as error:
        if not re.search("inline_container|PytorchStreamWriter", str(error)):
            raise
        # torch's writer raises it when data that it wrote is not there, or in place of an OSError of the file.
        hidden = error.__context__ if isinstance(error.__context__, OSError) else None
        reason = (hidden and hidden.strerror) or "not all of it could be written, as on a disk without room"
        raise CheckpointError(f"{doing}: {reason}") from error
