"""Find damage in the files of `torch.save`, by the sizes and checksums that they carry.

Such a file is a zip archive of uncompressed members, one for each tensor, each with the CRC-32 that was computed when
it was written. torch reads tensors without looking at it. Here threads read the members and compare: as many at a time
as this rank has cores, in pieces of a few MiB, so that reading and computing overlap and need no memory to speak of.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from smpkit.errors import CheckpointError
from smpkit.torch.distributed.cores import own_cores

__all__ = [
    "PIECE_BYTES",
    "Member",
    "check_archive",
    "crc_of",
    "find_corruption",
    "members_of",
    "share_of",
    "whole_file",
]

PIECE_BYTES: Final = 4 << 20
_MAX_THREADS: Final = 8
"""More do not read faster from any disk or network we know of."""
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class Member:
    """A run of bytes in a file.

    Args:
        name: what it is called in messages.
        offset: of its first byte in the file.
        size: in bytes.
        crc: the CRC-32 that it must have.
        start: the CRC-32 of what comes before it, which `crc` goes on from.
    """

    path: Path
    name: str
    offset: int
    size: int
    crc: int
    start: int = 0


def whole_file(path: Path, crc: int) -> Member:
    """Return a whole file as one member."""
    return Member(path, path.name, 0, path.stat().st_size, crc)


def check_archive(path: Path) -> None:
    """Raise CheckpointError unless a file's own description of its members is possible.

    The sizes of members are declared in the file, and torch allocates memory for them before it reads: a compressed
    member, or many that claim the same bytes, could ask for any amount. `torch.save` writes neither.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is a folder, a pipe or a device, not a file")
    except OSError:
        return  # the caller opens it, and says why that fails
    if zipfile.is_zipfile(path):
        members_of(path)


def members_of(path: Path) -> list[Member]:
    """Return the members of an archive.

    Raises:
        CheckpointError: it is damaged, or `torch.save` cannot have written it.
    """
    try:
        with path.open("rb") as file:
            return _members_in(file, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_open_archive(file: IO[bytes], name: str) -> None:
    """Do what `check_archive` does for an archive inside a file; `name` is for messages."""
    _members_in(file, Path(name))
    file.seek(0)


def _members_in(file: IO[bytes], path: Path) -> list[Member]:
    try:
        with zipfile.ZipFile(file) as archive:
            room, total, found = file.seek(0, os.SEEK_END), 0, []
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise CheckpointError(
                        f"{path} has a compressed member, `{info.filename}`, which torch.save never writes",
                        hint="load it with torch and save it again with torch.save",
                    )
                file.seek(info.header_offset)
                signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                # What torch takes for the start of the data follows from these lengths, and not from the directory.
                offset = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
                total += info.file_size
                if signature != b"PK\3\4" or offset + info.file_size > room or total > room:
                    raise zipfile.BadZipFile(f"`{info.filename}` is not where the archive's directory says")
                if file.read(name_length) != info.orig_filename.encode():
                    raise zipfile.BadZipFile(f"`{info.filename}` has another name than in the archive's directory")
                found.append(Member(path, info.filename, offset, info.file_size, info.CRC))
            return found
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def find_corruption(members: Iterable[Member]) -> str | None:
    """Read members, and return which of them is not as it was written; None if all are.

    Raises:
        OSError: a file cannot be read, which says nothing of what is in it.

    A CRC of 0 is none: `torch.serialization.set_crc32_options(False)` leaves them out.
    """
    wanted = [member for member in members if member.crc and member.size]
    with _threads() as pool:
        try:
            return next(filter(None, pool.map(_corruption, wanted)), None)
        finally:
            pool.shutdown(cancel_futures=True)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, own_cores()), "smpkit-checksums")


def _corruption(member: Member) -> str | None:
    try:
        crc = crc_of(member)
    except FileNotFoundError:
        return f"{member.path} is missing"
    if crc is None:
        return f"{member.path} ends inside `{member.name}`"
    if crc != member.crc:
        return f"`{member.name}` in {member.path} has the CRC-32 {crc:08x} instead of {member.crc:08x}"
    return None


def crc_of(member: Member) -> int | None:
    """Return the CRC-32 of a member's bytes; None if the file ends before they do."""
    crc, left = member.start, member.size
    with member.path.open("rb", buffering=0) as file:
        file.seek(member.offset)
        buffer = memoryview(bytearray(min(PIECE_BYTES, left)))
        while left:
            length = file.readinto(buffer[:left])
            if not length:
                return None
            crc, left = zlib.crc32(buffer[:length], crc), left - length
    return crc


def share_of(members: Sequence[Member], position: int, count: int) -> list[Member]:
    """Return the members that one of `count` ranks checks: about as many bytes as each of the others."""
    taken, mine = [0] * count, []
    for member in sorted(members, key=lambda member: -member.size):
        least = taken.index(min(taken))
        taken[least] += member.size
        if least == position:
            mine.append(member)
    return mine
