"""Files at a place, such as a folder of this machine or a prefix in S3: listed and read the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from smpkit.errors import CloudError, UnsupportedError

__all__ = ["Files", "Folder", "folder_here"]


class Files(Protocol):
    """Everything below a place; a name is a path from there, with slashes.

    All methods raise CloudError, in plain words.
    """

    @property
    def place(self) -> str:
        """S3 URI or path, without a slash at the end."""

    def list(self) -> Mapping[str, datetime]:
        """Return every file, and when it was written."""

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""


@dataclass(frozen=True)
class Folder:
    """A folder of this machine, or of a file system that it mounts."""

    path: Path

    @property
    def place(self) -> str:
        return str(self.path)

    def list(self) -> dict[str, datetime]:
        files = (path for path in self.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.path)): _written(path) for path in files}

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise CloudError(f"cannot read {self.path / name}: {(error.strerror or str(error)).lower()}") from None


def folder_here(place: str, what: str) -> Folder:
    """Return a folder that machines of a cluster mount, if this machine does, too.

    Args:
        what: whose folder it is, such as `a volume of the cluster`.

    Raises:
        UnsupportedError: it does not.
    """
    folder = Path(place)
    if not folder.is_dir():
        raise UnsupportedError(f"{place} is in {what}, which this machine does not see")
    return Folder(folder)


def _written(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
