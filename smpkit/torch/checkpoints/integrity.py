"""Find damage in files: by the checksums of an index, and by what archives of `torch.save` say of themselves.

Threads read the files and compare, as many at a time as this rank has cores, so that reading and computing overlap.
"""

from __future__ import annotations

import os
import stat
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from smpkit.errors import CheckpointError
from smpkit.torch.checkpoints.folder import PIECE_BYTES
from smpkit.torch.distributed.cores import own_cores

__all__ = ["archive_corruption", "check_archive", "find_corruption"]

_MAX_THREADS: Final = 8
"""More do not read faster from any disk or network we know of."""


def find_corruption(crcs: Mapping[Path, int]) -> str | None:
    """Read files, and return which of them has not this CRC-32; None if all have.

    Raises:
        OSError: a file cannot be read, which says nothing of what is in it.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, own_cores()), "smpkit-checksums") as pool:
        try:
            return next(filter(None, pool.map(_corruption, crcs, crcs.values())), None)
        finally:
            pool.shutdown(cancel_futures=True)


def _corruption(path: Path, wanted: int) -> str | None:
    crc = _crc_of(path)
    return None if crc == wanted else f"{path} has the CRC-32 {crc:08x} instead of {wanted:08x}"


def _crc_of(path: Path) -> int:
    crc, buffer = 0, memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            crc = zlib.crc32(buffer[:length], crc)
    return crc


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
    if not zipfile.is_zipfile(path):
        return
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            room, total = file.seek(0, os.SEEK_END), 0
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise CheckpointError(
                        f"{path} has a compressed member, `{info.filename}`, which torch.save never writes",
                        hint="load it with torch and save it again with torch.save",
                    )
                total += info.file_size
                with archive.open(info):  # compares what stands before the member with the directory
                    pass
                if info.header_offset + info.file_size > room or total > room:
                    raise zipfile.BadZipFile(f"`{info.filename}` is not where the archive's directory says")
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def archive_corruption(path: Path) -> str | None:
    """Return which member of a file of `torch.save` is not as it was written; None if all are, or it is no archive."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return None
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        name = archive.testzip()
    return None if name is None else f"`{name}` in {path} has not the CRC-32 that it was written with"
