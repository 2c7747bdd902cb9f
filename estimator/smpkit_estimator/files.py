"""Files at a place, a folder of this machine or a prefix in S3: listed, read and written the same way."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, Protocol

from smpkit.errors import CloudError, UnsupportedError
from smpkit_estimator.cloud import Cloud

__all__ = ["Bucket", "Files", "Folder", "Found", "Sink", "copied", "folder_here"]


@dataclass(frozen=True)
class Found:
    """One file."""

    size: int
    """In bytes."""
    modified: datetime


class Sink(Protocol):
    """What takes in a file."""

    def write(self, data: bytes, /) -> object: ...


class Files(Protocol):
    """Everything below a place; a name is a path from there, with slashes.

    All methods raise CloudError, in plain words.
    """

    @property
    def place(self) -> str:
        """S3 URI or path, without a slash at the end."""

    def list(self) -> Mapping[str, Found]:
        """Return every file."""

    def read(self, name: str, into: Sink) -> None:
        """Write a file's content to `into`."""

    def write(self, name: str, content: BinaryIO) -> None:
        """Make a file, or replace it."""


@dataclass(frozen=True)
class Bucket:
    """What lies below a prefix in S3."""

    cloud: Cloud
    uri: str
    kms_key: str | None = None

    @property
    def place(self) -> str:
        return self.uri.rstrip("/")

    def list(self) -> dict[str, Found]:
        cut = len(self.place.partition("://")[2].partition("/")[2].rstrip("/"))
        cut += bool(cut)
        return {item.key[cut:]: Found(item.size, item.modified) for item in self.cloud.objects(f"{self.place}/")}

    def read(self, name: str, into: Sink) -> None:
        self.cloud.fetch(f"{self.place}/{name}", into)

    def write(self, name: str, content: BinaryIO) -> None:
        self.cloud.send(content, f"{self.place}/{name}", self.kms_key)


@dataclass(frozen=True)
class Folder:
    """A folder of this machine, or of a file system that it mounts."""

    path: Path

    @property
    def place(self) -> str:
        return str(self.path)

    def list(self) -> dict[str, Found]:
        found = {}
        for path in self.path.rglob("*"):
            if path.is_file():
                facts = path.stat()
                modified = datetime.fromtimestamp(facts.st_mtime, timezone.utc)
                found[str(path.relative_to(self.path))] = Found(facts.st_size, modified)
        return found

    def read(self, name: str, into: Sink) -> None:
        try:
            with (self.path / name).open("rb") as file:
                _pass_on(file, into)
        except OSError as error:
            raise CloudError(f"cannot read {self.path / name}: {(error.strerror or str(error)).lower()}") from None

    def write(self, name: str, content: BinaryIO) -> None:
        target = self.path / name
        part = target.with_name(f"{target.name}.part")  # which no search for checkpoints takes for one
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                _pass_on(content, file)
            part.replace(target)
        except OSError as error:
            raise CloudError(f"cannot write {target}: {(error.strerror or str(error)).lower()}") from None


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


def copied(source: Files, target: Files, name: str) -> None:
    """Copy one file."""
    with tempfile.TemporaryFile(prefix="smpkit-") as file:
        source.read(name, file)
        file.seek(0)
        target.write(name, file)


def _pass_on(source: BinaryIO, target: Sink) -> None:
    while chunk := source.read(1 << 20):
        target.write(chunk)
