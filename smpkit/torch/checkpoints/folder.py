"""The files of checkpoints: their names, how a checkpoint appears completely or not at all, which is the newest.

::

    path/
      {tag}_partial/               the whole job; appears by one rename, with everything in it
          model_{pp}_{tp}_{rdp}.safetensors      what one rank writes of weights and buffers,
          optimizer_{pp}_{tp}_{rdp}.safetensors  of optimizer states and master weights,
          optimizer_{pp}_{tp}_{rdp}.pt           likewise, what is no tensor: settings of groups, the loss scale
          user_content.pt          the script's own content; `user_content_{rank}.pt` on other file systems
          index.json               where each tensor is; sizes and checksums; degrees, partition, which save it was
      {tag}                        full: the model's state dict in one file
      user_content_{tag}           full: the script's own content
      newest                       name of the newest, `{tag}_partial` or `{tag}`
      .{name}.{save id}.tmp        being written, or left over from a job that died; read only if its index is there

The index is the same on all hosts, and no two ranks write files of one name. So where each host has a folder of its
own, what copies these folders into one, as SageMaker does in S3, makes a checkpoint that any host can resume.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import torch

from smpkit.config.documents import read_regular
from smpkit.config.words import quoted
from smpkit.errors import CheckpointError, UsageError
from smpkit.plan.tune.chain import Choice
from smpkit.torch.checkpoints.agreement import go_on
from smpkit.torch.distributed.cores import own_cores

INDEX: Final = "index.json"
NEWEST: Final = "newest"
PARTIAL: Final = "_partial"
PIECE_BYTES: Final = 4 << 20
"""What is read, or written, at a time: it is still in the processor's cache when its checksum is computed."""
_FORMAT: Final = 4
_CRC: Final = "crc32"
"""The key in the index of the checksum of all the rest of it."""
_NOT_A_FILE: Final = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG),
    None,  # of a library
)
"""The errors of a path that leads to no file, which is damage."""
_MAX_THREADS: Final = 8
"""More do not read faster from any disk or network we know of."""
_READ_SECONDS: Final = 1.0
"""After so long other ranks may want to know that this one goes on."""
_MAX_JSON_BYTES: Final = 1 << 30
_MAX_NAME_BYTES: Final = 1 << 12
FLUSHED_BYTES: Final = 256 << 20
"""Is flushed to the disk at a time: to flush a large file as a whole takes longer than other ranks wait."""
_TEMPORARY: Final = re.compile(r"\.(?P<name>.+)\.(?P<save_id>[0-9a-f]{16})\.tmp")


@dataclass(frozen=True)
class Index:
    """Describes a partial checkpoint.

    Args:
        tag: the script's name for it.
        save_id: of the save that wrote it.
        order: grows by one with each save to the same folder; a time would depend on the clocks of restarted hosts.
        degrees: pipeline, virtual pipeline and tensor degree it was saved with.
        precision: of the weights beside which there are float32 masters, or `float32`.
        smpkit: version that wrote it.
        files: by name, `size` in bytes, `crc32`, and who wrote it: `rank`, `host`, and `folder`, the lowest rank that
            shares its file system.
        tensors: by name, `dtype`, `shape` and `pieces`: for each chunk of the whole tensor its file, the name there,
            its offsets and sizes in the whole tensor, and its offsets in the tensor of the file.
        objects: by name, the files of `torch.save` that hold this other value.
        random: seed and step of the streams of random numbers, so that dropout continues exactly.
        partition: the assignment of units to pipeline ranks (`Assignment.to_json`); None before the first step.
        activations: what each layer does with its activations, where that was chosen automatically.
        format: version of this layout.
    """

    tag: str
    save_id: str
    order: int
    degrees: Mapping[str, int]
    precision: str
    smpkit: str
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    objects: Mapping[str, list[str]] = field(default_factory=dict)
    random: Mapping[str, int] = field(default_factory=dict)
    partition: str | None = None
    activations: Mapping[str, str] = field(default_factory=dict)
    format: int = _FORMAT

    def __post_init__(self) -> None:
        """Raise ValueError for what a forged index must not claim: files elsewhere, tensors larger than their files."""
        numbers: list[Any] = [entry[key] for entry in self.files.values() for key in ("size", "crc32", "folder")]
        if not all(isinstance(number, int) for number in (self.order, *numbers)):
            raise ValueError("a size or a count is no whole number")
        if not set(self.activations.values()) <= set(Choice):
            raise ValueError("a layer's choice is unknown")
        for name in self.files:
            if Path(name).name != name or name in ("", "..") or "\0" in name:  # it could name any file of this machine
                raise ValueError(f"{quoted(name)} is not a file in this folder")
        named = {piece[0] for spec in self.tensors.values() for piece in spec["pieces"]}
        if unknown := named.union(*self.objects.values()) - self.files.keys():
            raise ValueError(f"{min(unknown)} is no file of this checkpoint")
        for name, spec in self.tensors.items():  # readers allocate memory by these numbers
            num_elements = 0
            for file, _, offsets, sizes, local_start in spec["pieces"]:
                num_bytes = math.prod(sizes) * dtype_of(spec).itemsize
                if min((*offsets, *sizes, *local_start), default=0) < 0 or num_bytes > self.files[file]["size"]:
                    raise ValueError(f"`{name}` cannot have {list(sizes)} elements in {file}")
                num_elements += math.prod(sizes)
            if min(spec["shape"], default=0) < 0 or math.prod(spec["shape"]) > num_elements:
                raise ValueError(f"`{name}` of shape {list(spec['shape'])} has only {num_elements} elements")

    def to_text(self) -> str:
        """Return the content of `index.json`: one line for each field."""
        content = asdict(self)
        lines = [
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in [*content.items(), (_CRC, _crc_of(content))]
        ]
        return "{\n " + ",\n ".join(lines) + "\n}\n"


def dtype_of(spec: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a tensor in an index; raise ValueError if it is none."""
    dtype = getattr(torch, spec["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{spec['dtype']} is no dtype")
    return dtype


def check_tag(tag: object) -> None:
    """Raise UsageError unless `tag` can be a file name that smpkit does not use itself."""
    if (
        not isinstance(tag, str)
        or not re.fullmatch(r"[^/.][^/]*", tag)
        or tag == NEWEST
        or not tag.isprintable()  # nor is what cannot be read back from the file `newest`
        or tag != tag.strip()
    ):
        raise UsageError(
            f"{tag!r} cannot be the tag of a checkpoint",
            hint="use a plain name such as `step_100`, without `/`",
        )


def folder_at(path: str | os.PathLike[str]) -> Path:
    """Return the folder that a script names; raise UsageError for what would become, or seem, an empty one."""
    folder, text = Path(path), os.fspath(path)
    if re.match(r"~|\w\w+:/", text):
        hint = "name it from `/`; what a job saves to its SMPKIT_CHECKPOINT_DIR goes to its `checkpoints:`, such as S3"
        raise UsageError(f"{text!r} is no folder of this machine", hint=hint)
    if folder.is_file():
        raise UsageError(f"{folder} is a file", hint="name the folder it is in, and the file as the tag to load it")
    if folder.name.endswith(PARTIAL) and (folder / INDEX).is_file():
        raise UsageError(
            f"{folder} is a checkpoint itself",
            hint=f"name the folder it is in, {folder.parent}, and its tag to load it",
        )
    return folder


# --- writing ----------------------------------------------------------------------------------------------------------


def pieces_of(data: memoryview) -> Iterator[memoryview]:
    """Yield bytes in pieces that are written one after the other."""
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


class _CheckedFile:
    """Counts the size and the CRC-32 of what is written through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = self.crc = self._flushed = 0

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        for piece in pieces_of(data):
            self.crc = zlib.crc32(piece, self.crc)
            self._file.write(piece)
            self.size += len(piece)
            if self.size - self._flushed > FLUSHED_BYTES:
                self.sync()
            go_on()
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        """Flush it to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._flushed = self.size


def fsync_write(path: Path, write: Callable[[IO[bytes]], object]) -> tuple[int, int]:
    """Write a new file from its begin to its end and flush it to the disk; return its size in bytes, and its CRC-32."""
    with path.open("wb") as file:
        checked = _CheckedFile(file)
        write(cast("IO[bytes]", checked))
        checked.sync()
    return checked.size, checked.crc


def atomic_write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace `path` by a new file in one rename. Readers see the old file or the new one."""
    temporary = staging_path(path.parent, path.name)  # in the same folder: a rename is atomic there
    try:
        # Flush before the rename, or after a crash the new name may be there without its content.
        fsync_write(temporary, write)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush renames in `folder` to the disk, where the file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def new_save_id() -> str:
    return secrets.token_hex(8)


def staging_path(path: Path, name: str, save_id: str | None = None) -> Path:
    """Return where `path / name` is written before it is published."""
    return path / f".{name}.{save_id or new_save_id()}.tmp"


def publish_folder(staged: Path, target: Path, index: str) -> None:
    """Write the index of a complete folder and rename it to its final name, replacing an older one of that name.

    Does nothing if somebody else has published it: another host on the same file system, or whoever looks for
    checkpoints there meanwhile, as `finish_saves` does.
    """
    replaced = staging_path(target.parent, target.name)
    try:
        fsync_write(staged / INDEX, lambda file: file.write(index.encode()))
        sync_folder(staged)
        # Another job that saves to the same folder takes this one for what a dead job has left.
        if damage := find_damage(staged, read_index(staged)):
            raise CheckpointError(f"{damage}: does another job save to {target.parent} at the same time?")
        # A folder cannot be replaced in one rename: if the job dies in between, `finish_saves` does the second one.
        if target.exists() and not _has_index(target, index):
            target.rename(replaced)
        staged.rename(target)
    except (FileNotFoundError, CheckpointError):
        if _has_index(target, index):
            return
        raise
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _has_index(folder: Path, text: str) -> bool:
    try:
        return (folder / INDEX).read_text() == text
    except (OSError, ValueError):
        return False


def finish_saves(path: Path) -> None:
    """Rename what saves have written whose job died before it could: a folder with its index is complete.

    Without this, a job that saves under one tag again and again has no checkpoint at all between the two renames.
    """
    for leftover in path.glob(f".*{PARTIAL}.*.tmp"):
        staged = _TEMPORARY.fullmatch(leftover.name)
        if staged is None or not (leftover / INDEX).is_file() or (target := path / staged["name"]).exists():
            continue
        # One that was about to be removed has the name of another save than its own.
        with contextlib.suppress(CheckpointError, OSError):  # where nobody may write, or another rank was faster
            index = read_index(leftover)
            if index.save_id == staged["save_id"] and find_damage(leftover, index) is None:
                leftover.rename(target)


def remove_leftovers(path: Path, save_id: str) -> None:
    """Remove the leftovers in `path` of saves that died, except those of the save with `save_id`."""
    finish_saves(path)
    for leftover in path.glob(".*.tmp"):
        ours = _TEMPORARY.fullmatch(leftover.name)
        if ours is None or ours["save_id"] == save_id:
            continue
        if leftover.is_dir():
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


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_index(folder: Path) -> Index:
    """Return the index of a partial checkpoint; raise CheckpointError if it is missing, damaged or another format's."""
    try:
        data = read_regular(folder / INDEX, _MAX_JSON_BYTES)
        if len(data) > _MAX_JSON_BYTES:
            raise ValueError(f"it has more than {_MAX_JSON_BYTES >> 30} GiB")
        content = json.loads(data)
        crc = content.pop(_CRC, None)
        # Whatever the format: the bit that flipped may be in its number.
        if crc is not None and crc != _crc_of(content):
            raise ValueError("its checksum does not fit its content")
        if content.get("format") != _FORMAT:
            raise _another_format(folder, content)
        return Index(**content)
    except FileNotFoundError:
        if not folder.exists():
            raise CheckpointError(f"there is no folder {folder}") from None
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {INDEX}",
            hint="it was not copied as a whole, or SageMaker's own library wrote it: that can save with partial=False",
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise CheckpointError(f"{folder / INDEX} is damaged: it is nested too deeply") from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{folder / INDEX} is damaged: {error}") from error


def _another_format(folder: Path, content: Mapping[str, Any]) -> _AnotherFormatError:
    number = content.get("format")
    is_older = isinstance(number, int) and number < _FORMAT
    age = "an older" if is_older else "a newer"
    export = "with the version that wrote it, save the model with partial=False, and load that file with partial=False"
    return _AnotherFormatError(
        f"{folder} has format {quoted(number)}, of {age} smpkit ({quoted(content.get('smpkit'))}); "
        f"this one reads format {_FORMAT}",
        hint=f"{export}; or start anew in another folder" if is_older else "update smpkit to the version that wrote it",
    )


def look_at(folder: Path, index: Index, names: Iterable[str]) -> tuple[str | None, list[str]]:
    """Return what is wrong with the kinds and sizes of files, None if nothing is; and which of them are not there.

    Raise CheckpointError where this machine cannot tell.
    """
    missing = []
    for name in names:
        status, size = _stat(folder / name), index.files[name]["size"]
        if status is None:
            missing.append(name)
        elif not stat.S_ISREG(status.st_mode):
            return f"{folder / name} is a folder, a pipe or a device, not a file", missing
        elif status.st_size != size:
            return f"{folder / name} has {status.st_size} bytes instead of {size}", missing
    return None, missing


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError as error:
        if is_fault_of_machine(error):
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return None


def find_corruption(crcs: Mapping[Path, int]) -> str | None:
    """Return which of these files has not the CRC-32 that it should have; None if all have.

    Threads read them, as many at a time as this rank has cores, so that reading and computing overlap. A file that
    cannot be read raises OSError, which says nothing of what is in it.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, own_cores()), "smpkit-checksums") as pool:
        try:
            sums = [pool.submit(_crc_of_file, path) for path in crcs]
            for (path, wanted), crc in zip(crcs.items(), sums, strict=True):
                while not wait([crc], _READ_SECONDS).done:
                    go_on()
                if crc.result() != wanted:
                    return f"{path} has the CRC-32 {crc.result():08x} instead of {wanted:08x}"
            return None
        finally:
            pool.shutdown(cancel_futures=True)


def _crc_of_file(path: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            crc = zlib.crc32(buffer[:length], crc)
    return crc


def missing_text(folder: Path, index: Index, missing: Collection[str]) -> str | None:
    """Return what to say of files that are not there; None if those of one file system, at least, are complete."""
    lacking: dict[int, list[str]] = {entry["folder"]: [] for entry in index.files.values()}
    for name in sorted(missing):
        lacking[index.files[name]["folder"]].append(name)
    fewest = min(lacking.values(), key=len, default=[])
    return f"{folder / fewest[0]} is missing" if fewest else None


def find_damage(folder: Path, index: Index) -> str | None:
    """Return what is wrong with the kinds and sizes of a checkpoint's files; None if they are complete."""
    damage, missing = look_at(folder, index, index.files)
    return damage or missing_text(folder, index, missing)


@dataclass(frozen=True)
class Survey:
    """What a folder holds that is, or should be, a checkpoint of one kind.

    Args:
        usable: checkpoints by name with their indices (None: a full one), that of `newest` first, then those saved
            last; their files were not looked at.
        damaged: what is wrong with the others, by name; with `newest` itself, under its own name.
        newest: the name in `newest`, None if there is no such file or no name in it.
    """

    usable: Mapping[str, Index | None]
    damaged: dict[str, str]
    newest: str | None


def survey(path: Path, partial: bool) -> Survey:
    """Look at all checkpoints of one kind in a folder; raise CheckpointError if the newest has another format."""
    damaged: dict[str, str] = {}
    finish_saves(path)
    try:
        newest = read_newest(path)
    except CheckpointError as error:
        if is_fault_of_machine(error):
            raise
        newest, damaged[NEWEST] = None, error.message
    usable: dict[str, Index | None] = {}
    if partial:
        usable |= _indices_in(path, newest, damaged)
    elif newest is not None and not newest.endswith(PARTIAL) and (path / newest).is_file():
        usable[newest] = None
    # Whatever `newest` names was saved: not to find it is no reason to start anew.
    if newest is not None and newest not in (*usable, *damaged):
        if newest.endswith(PARTIAL) == partial:
            damaged[newest] = "it is missing"
        elif not usable:
            is_there, kind = (path / newest).exists(), "full" if partial else "partial"
            damaged[newest] = f"it is a {kind} checkpoint: use partial={not partial}" if is_there else "it is missing"
    # It may be an older one, of whoever wants to go back to it.
    named = {newest: usable[newest]} if newest in usable else {}
    return Survey(named | usable, damaged, newest)


def _indices_in(path: Path, newest: str | None, damaged: dict[str, str]) -> dict[str, Index]:
    """Return the indices of the partial checkpoints in a folder by name, the newest first."""
    indices: dict[str, Index] = {}
    for folder in sorted(path.glob(f"*{PARTIAL}")):
        try:
            indices[folder.name] = read_index(folder)
        except CheckpointError as error:
            # Of any folder: it may be the newest that is left, where what `newest` names is damaged or gone.
            if is_fault_of_machine(error) or (folder.name == newest and isinstance(error, _AnotherFormatError)):
                raise
            damaged[folder.name] = error.message
    return dict(sorted(indices.items(), key=lambda item: -item[1].order))


def complete_partials(path: Path) -> list[str]:
    """Return the names of the complete partial checkpoints in `path`, newest first."""
    return [name for name, index in _indices_in(path, None, {}).items() if find_damage(path / name, index) is None]


def next_order(path: Path, last: int) -> int:
    """Return the order of the next save to a folder; raise CheckpointError if another job saves there.

    Args:
        last: the order of this job's last save to it; 0: it has not saved there.
    """
    name, index = next(iter(_indices_in(path, None, {}).items()), (None, None))
    order = 0 if index is None else index.order
    if order > last > 0:
        raise CheckpointError(
            f"another job has saved `{name}` to {path} since this one did",
            hint="each job needs a folder of its own: one replaces and removes what the other has saved",
        )
    return 1 + order


def read_newest(path: Path) -> str | None:
    """Return the name in `newest`; None if there is no such file. Raise CheckpointError if it holds no name."""
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
