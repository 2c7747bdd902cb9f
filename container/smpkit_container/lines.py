"""Cut a stream of bytes into whole lines, and tell progress updates (ended by a carriage return) from lines."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LineSplitter", "Piece"]


@dataclass(frozen=True)
class Piece:
    """One line of text without its end; a `passing` one is a progress update that the next piece replaces."""

    text: str
    passing: bool = False


class LineSplitter:
    """Collects bytes until a line is whole; text that is not UTF-8 gets replacement characters.

    A line longer than `max_bytes` is given out in parts, so that a rank that never ends a line cannot fill the memory.
    """

    def __init__(self, max_bytes: int = 4 * 2**20) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._max_bytes = max_bytes
        self._overwritten = False

    def feed(self, data: bytes) -> list[Piece]:
        """Add `data`; return the lines that became whole, and last, if it is one, the present progress update."""
        *ended, rest = data.split(b"\n")
        pieces = [self._line(self._take() + part) for part in ended]
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
            self._overwritten = self._overwritten or b"\r" in rest
        if self._overwritten and rest:
            pieces += self._progress()
        if self._size > self._max_bytes:
            pieces.append(self._line(self._take()))
        return pieces

    def close(self) -> list[Piece]:
        """Return what was left without an end of line."""
        rest = self._take()
        return [self._line(rest)] if rest.strip(b"\r") else []

    def _take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts, self._size, self._overwritten = [], 0, False
        return taken

    def _line(self, raw: bytes) -> Piece:
        return Piece(_last_version(raw))

    def _progress(self) -> list[Piece]:
        """Return the visible version of an unfinished, overwritten line, and forget the versions before it."""
        raw = self._take()
        kept = raw[raw.rstrip(b"\r").rfind(b"\r") + 1 :]
        self._parts, self._size, self._overwritten = [kept], len(kept), True
        text = _last_version(kept)
        return [Piece(text, passing=True)] if text else []


def _last_version(raw: bytes) -> str:
    """Return what a terminal shows of a line that carriage returns have overwritten."""
    visible = raw.rstrip(b"\r").rpartition(b"\r")[2]
    return visible.decode("utf-8", errors="replace")
