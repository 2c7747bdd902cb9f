"""The files of checkpoints: their names, how a checkpoint appears completely or not at all, which is the newest.

::

    path/
      {tag}_partial/               one rank's part per file; appears by one rename, with everything in it
          model_{pp}_{tp}.safetensors  optimizer_{pp}_{tp}.safetensors  fp16_states_{pp}_{tp}.safetensors
          optimizer_{pp}_{tp}.pt   likewise, what is no tensor: settings of parameter groups, the loss scale
          user_content.pt          the script's own content
          pieces.json              where each tensor of the whole model is: shape, dtype, chunks in the files
          index.json               degrees, sizes, checksums, partition, and which save it was
      {tag}                        full: the model's state dict in one file
      user_content_{tag}           full: the script's own content
      newest                       name of the newest, `{tag}_partial` or `{tag}`
      .{name}.{save id}.tmp        being written, or left over from a job that died; never read
      .{name}.{save id}.old.tmp    what a save was about to replace when its job died; read if `{name}` is not there
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from smpkit.config.documents import read_regular
from smpkit.config.words import quoted
from smpkit.errors import CheckpointError, UsageError
from smpkit.plan.tune.chain import Choice

__all__ = [
    "INDEX",
    "NEWEST",
    "PARTIAL",
    "Index",
    "Survey",
    "as_checkpoint_error",
    "atomic_write",
    "check_tag",
    "complete_partials",
    "find_damage",
    "folder_of",
    "fsync_write",
    "is_fault_of_machine",
    "new_save_id",
    "publish_folder",
    "read_index",
    "read_json",
    "read_newest",
    "remove_leftovers",
    "staging_folder",
    "survey",
    "write_index",
]

INDEX: Final = "index.json"
NEWEST: Final = "newest"
PARTIAL: Final = "_partial"
_FORMAT: Final = 3
_READABLE: Final = (2, 3)
"""In format 2, tensors are in files of `torch.save`, too, which carry their own checksums."""
_CRC: Final = "crc32"
"""The key in the index of the checksum of all the rest of it."""
_NOT_A_FILE: Final = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG),
    None,  # of a library
)
"""The errors of a path that leads to no file, which is damage."""
_MAX_JSON_BYTES: Final = 1 << 30
_MAX_NAME_BYTES: Final = 1 << 12
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
        hosts: of hosts that had a folder each, the files in each and who wrote them; empty if they shared one.
        format: version of this layout.
        random: seed and step of the streams of random numbers, so that dropout continues exactly.
        partition: the assignment of units to pipeline ranks (`Assignment.to_json`); None before the first step.
        activations: what each layer does with its activations, where that was chosen automatically.
        checksums: CRC-32 by file; of a safetensors file, that of its header, which holds those of its tensors.
    """

    tag: str
    save_id: str
    order: int
    degrees: Mapping[str, int]
    smpkit: str
    files: Mapping[str, int] = field(default_factory=dict)
    hosts: Sequence[Mapping[str, str]] = ()
    format: int = _FORMAT
    random: Mapping[str, int] = field(default_factory=dict)
    partition: str | None = None
    activations: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError if a field cannot be what it should: the index may be damaged or forged."""
        counts = [self.order, *self.degrees.values(), *self.files.values(), *self.checksums.values()]
        if not all(isinstance(number, int) for number in (*counts, *self.random.values())) or min(counts) < 0:
            raise ValueError("a size or a count is no whole number")
        if not all(isinstance(text, str) for text in (self.tag, self.save_id, self.partition or "")):
            raise ValueError("a name is no text")
        if not set(self.activations.values()) <= set(Choice):
            raise ValueError("a layer's choice is unknown")
        for name in (*self.files, *self.checksums, *itertools.chain(*self.hosts)):
            if Path(name).name != name or name in ("", "..") or "\0" in name:  # it could name any file of this machine
                raise ValueError(f"{quoted(name)} is not a file in this folder")


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
    content = asdict(index)
    text = json.dumps({**content, _CRC: _crc_of(content)}, indent=1)
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


def is_fault_of_machine(error: BaseException | None) -> bool:
    """Return whether an error says nothing of a file: too many are open, memory is short, its server is away.

    Such a checkpoint may be intact, so it is no reason to go back to an older one.
    """
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno not in _NOT_A_FILE):
            return True
        error = error.__cause__
    return False


class _AnotherFormatError(CheckpointError):
    """A checkpoint is whole, but not of the format that this version reads."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    data = read_regular(path, _MAX_JSON_BYTES)
    if len(data) > _MAX_JSON_BYTES:
        raise ValueError(f"it has more than {_MAX_JSON_BYTES >> 30} GiB")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_index(folder: Path) -> Index:
    """Return the index of a partial checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    try:
        content = read_json(folder / INDEX)
        crc = content.pop(_CRC, None)
        if crc is not None and crc != _crc_of(
            content
        ):  # whatever the format: the bit that flipped may be in its number
            raise ValueError("its checksum does not fit its content")
        if content.get("format") not in _READABLE:
            raise _another_format(folder, content)
        content.pop("elsewhere", None)  # of format 2
        return Index(**content)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {INDEX}",
            hint="it was not copied as a whole, or SageMaker's own library wrote it: that can save with partial=False",
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged: {error}") from error


def _another_format(folder: Path, content: Mapping[str, Any]) -> _AnotherFormatError:
    found = content.get("format")
    older = isinstance(found, int) and found < min(_READABLE)
    age = "an older" if older else "a newer"
    export = "with the version that wrote it, save the model with partial=False, and load that file with partial=False"
    return _AnotherFormatError(
        f"{folder} has format {quoted(found)}, of {age} smpkit ({quoted(content.get('smpkit'))}); "
        f"this one reads formats {' and '.join(map(str, _READABLE))}",
        hint=f"{export}; or start anew in another folder" if older else "update smpkit to the version that wrote it",
    )


def find_damage(folder: Path, index: Index) -> str | None:
    """Return what is wrong with the names, kinds and sizes of a checkpoint's files; None if nothing is.

    If hosts had a folder each, those of one host are enough.

    Raises:
        CheckpointError: this machine cannot tell.
    """
    missing = set()
    for name, size in index.files.items():
        try:
            found = (folder / name).stat()
        except OSError as error:
            if is_fault_of_machine(error):
                raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
            missing.add(name)
            continue
        if not stat.S_ISREG(found.st_mode):
            return f"{folder / name} is a folder, a pipe or a device, not a file"
        if found.st_size != size:
            return f"{folder / name} has {found.st_size} bytes instead of {size}"
    hosts = [host.keys() for host in index.hosts] or [index.files.keys()]
    lacking = min((sorted(missing & host) for host in hosts), key=len)
    return f"{folder / lacking[0]} is missing" if lacking else None


@dataclass(frozen=True)
class Survey:
    """What a folder holds that is, or should be, a checkpoint of one kind.

    Args:
        usable: complete checkpoints by name with their indices (None: a full one), the newest first: the one that
            `newest` names, then by age.
        damaged: what is wrong with the others, by name; with `newest` itself, under its own name.
        newest: the name in `newest`, None if there is no such file or no name in it.
    """

    usable: Mapping[str, Index | None]
    damaged: Mapping[str, str]
    newest: str | None


def survey(path: Path, partial: bool) -> Survey:
    """Look at all checkpoints of one kind in a folder; sizes are compared, contents are not.

    Raises:
        CheckpointError: the newest one has another format, or this machine cannot tell.
    """
    damaged: dict[str, str] = {}
    try:
        newest = read_newest(path)
    except CheckpointError as error:
        if is_fault_of_machine(error):
            raise
        newest, damaged[NEWEST] = None, error.message
    usable: dict[str, Index | None] = {}
    if partial:
        usable |= _survey_partials(path, newest, damaged)
    elif newest is not None and not newest.endswith(PARTIAL) and (path / newest).is_file():
        usable[newest] = None
    # Whatever `newest` names was saved: not to find it is no reason to start anew.
    if newest is not None and not usable and newest not in damaged:
        other = newest.endswith(PARTIAL) != partial and (path / newest).exists()
        kind = "partial" if newest.endswith(PARTIAL) else "full"
        damaged[newest] = f"it is a {kind} checkpoint: use partial={not partial}" if other else "it is missing"
    return Survey(usable, damaged, newest)


def _survey_partials(path: Path, newest: str | None, damaged: dict[str, str]) -> dict[str, Index]:
    found: dict[str, Index] = {}
    names = {each.name for each in path.glob(f"*{PARTIAL}")}
    if newest is not None and newest.endswith(PARTIAL):
        names.add(newest)
    for name in sorted(names):
        folder = folder_of(path, name)
        if not folder.exists():
            damaged[name] = "it is missing"
            continue
        try:
            index = read_index(folder)
            damage = find_damage(folder, index)
        except CheckpointError as error:
            if name == newest and (isinstance(error, _AnotherFormatError) or is_fault_of_machine(error)):
                raise
            damage = error.message
        if damage:
            damaged[name] = damage
        else:
            found[name] = index
    return dict(sorted(found.items(), key=lambda item: (item[0] != newest, -item[1].order)))


def folder_of(path: Path, name: str) -> Path:
    """Return the folder of a partial checkpoint: where an interrupted replacement has moved it, if it did."""
    if not (path / name).exists():
        for moved in path.glob(".*.old.tmp"):
            ours = _TEMPORARY.fullmatch(moved.name)
            if ours is not None and ours["name"] == name:
                return moved
    return path / name


def complete_partials(path: Path) -> list[tuple[str, Index]]:
    """Return the folders of complete partial checkpoints in `path` and their indices, newest first."""
    return sorted(_survey_partials(path, None, {}).items(), key=lambda item: -item[1].order)


def read_newest(path: Path) -> str | None:
    """Return the name in `newest`; None if there is no such file.

    Raises:
        CheckpointError: it cannot be read, or holds no name of a checkpoint.
    """
    try:
        name = read_regular(path / NEWEST, _MAX_NAME_BYTES)[:_MAX_NAME_BYTES].decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path / NEWEST} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        name = ""
    if not name or "/" in name or name.startswith(".") or not name.isprintable():
        raise CheckpointError(f"{path / NEWEST} does not hold the name of a checkpoint")
    return name


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
