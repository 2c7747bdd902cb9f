"""Read a file that somebody else has named: a pipe would block for ever, a device never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_regular"]


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file, at most `max_bytes` + 1 bytes of it: more means that it is larger.

    Raises:
        OSError: there is no such file, it cannot be read, or it is a folder, a pipe or a device.
        ValueError: the path has a null byte.
    """
    # Without O_NONBLOCK, opening a pipe that nobody writes to waits for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(path))
        return file.read(max_bytes + 1)
