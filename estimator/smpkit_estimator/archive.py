"""Pack sources into one archive that is the same for the same content: sorted, without times and owners.

The hash covers the uncompressed tar stream, so it does not depend on the version of zlib.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, BinaryIO

from smpkit.config.words import printable
from smpkit.errors import ConfigError, Problem
from smpkit_estimator.ignore import holds_secret
from smpkit_estimator.sources import Entry, Sources

__all__ = ["Packed", "fingerprint", "pack"]

_CHUNK_BYTES = 2**20
_LEVEL = 5
"""On 10,000 Python files: two thirds of the time of level 6, and 1 % larger."""

_GZIP_WINDOW = 16 + zlib.MAX_WBITS  # a gzip file, with no name and no time in its header
_END = b"\0" * 1024


@dataclass(frozen=True)
class Packed:
    """What was packed."""

    digest: str
    """SHA-256 of the uncompressed archive, in hexadecimal."""
    num_files: int
    num_bytes: int
    """Size of the uncompressed archive."""
    secrets: tuple[str, ...] = ()
    """Names of files left out because their content is or holds a key."""
    suspects: tuple[str, ...] = ()
    """Names of Python files that hold a key; the job may need them, so they are packed."""


def fingerprint(sources: Sources, extra: Mapping[str, bytes] | None = None) -> Packed:
    """Read everything and return what `pack` would, without compressing or writing anything."""
    return _pass(sources, extra or {}, lambda _: None)


def pack(sources: Sources, target: BinaryIO, extra: Mapping[str, bytes] | None = None) -> Packed:
    """Write the compressed archive (`.tar.gz`) to `target`.

    Args:
        extra: more files, name -> content, that are made for this job.

    Raises:
        ConfigError: a file cannot be read, or changed while it was.
    """
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    packed = _pass(sources, extra or {}, lambda chunk: target.write(compressor.compress(chunk)))
    target.write(compressor.flush())
    return packed


def _pass(sources: Sources, extra: Mapping[str, bytes], take: Callable[[bytes], object]) -> Packed:
    digest = hashlib.sha256()
    size = 0
    secrets: list[str] = []
    suspects: list[str] = []
    for chunk in _chunks(sources, extra, secrets, suspects):
        digest.update(chunk)
        size += len(chunk)
        take(chunk)
    return Packed(
        digest.hexdigest(), len(sources.entries) + len(extra) - len(secrets), size, tuple(secrets), tuple(suspects)
    )


def _chunks(sources: Sources, extra: Mapping[str, bytes], secrets: list[str], suspects: list[str]) -> Iterator[bytes]:
    made = {entry.name for entry in sources.entries} & set(extra)
    if made:
        name = sorted(made)[0]
        raise ConfigError([Problem(("source_dir",), f"`{name}` is a name that smpkit needs", "rename your file")])
    for name, content in sorted(extra.items()):
        yield from _member(_header(name, len(content), executable=False), content)
    for entry in sources.entries:
        yield from _entry(entry, secrets, suspects)
    yield _END


def _entry(entry: Entry, secrets: list[str], suspects: list[str]) -> Iterator[bytes]:
    try:
        with entry.path.open("rb", buffering=0) as file:
            first = file.read(_CHUNK_BYTES)
            secret = holds_secret(first, whole=len(first) < _CHUNK_BYTES)
            if secret and entry.name.endswith(".py"):
                suspects.append(entry.name)
            if secret and not entry.name.endswith(".py"):
                secrets.append(entry.name)
            elif len(first) < _CHUNK_BYTES:
                yield from _member(_header(entry.name, len(first), entry.executable), first)
            else:
                size = entry.path.stat().st_size
                yield _header(entry.name, size, entry.executable)
                yield from _large(entry, file, first, size)
    except OSError as error:
        raise ConfigError([Problem(("source_dir",), f"`{printable(entry.name)}` cannot be read: {error}")]) from None


def _member(header: bytes, content: bytes) -> Iterator[bytes]:
    yield header + content + b"\0" * (-len(content) % 512)


def _large(entry: Entry, file: IO[bytes], first: bytes, size: int) -> Iterator[bytes]:
    """Yield a file in parts, as many bytes as its header says: one that grows is cut, one that shrinks fails."""
    rest = size
    chunk = first
    while rest and chunk:
        chunk = chunk[:rest]
        yield chunk
        rest -= len(chunk)
        chunk = file.read(_CHUNK_BYTES) if rest else b""
    if rest:
        message = f"`{printable(entry.name)}` became shorter while it was packed"
        raise ConfigError([Problem(("source_dir",), message, "submit when nothing writes to the sources")])
    yield b"\0" * (-size % 512)


_USTAR_NAME_BYTES = 100
_USTAR_SIZE = 8**11  # eleven octal digits
_BEFORE_SIZE = {executable: b"%07o\0" % mode + b"0000000\0" * 2 for executable, mode in ((False, 0o644), (True, 0o755))}
_TIME = b"00000000000\0"
_AFTER_SUM = b"0" + b"\0" * 100 + b"ustar\x0000" + b"\0" * 247
_SUM_AFTER = 8 * ord(" ") + sum(_AFTER_SUM)  # the checksum is computed with blanks in its own field


def _header(name: str, size: int, executable: bool) -> bytes:
    """Return the header of a file; for short plain names without `tarfile`, which takes four times as long."""
    encoded = name.encode()
    if len(encoded) <= _USTAR_NAME_BYTES and len(encoded) == len(name) and size < _USTAR_SIZE:
        before = encoded.ljust(100, b"\0") + _BEFORE_SIZE[executable] + b"%011o\0" % size + _TIME
        return before + b"%06o\0 " % (sum(before) + _SUM_AFTER) + _AFTER_SUM
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o755 if executable else 0o644
    return info.tobuf(tarfile.PAX_FORMAT)
