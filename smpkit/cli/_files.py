"""Files that a command writes beside what it prints."""

from __future__ import annotations

from pathlib import Path

from smpkit.errors import SmpkitError

__all__ = ["write_file"]


def write_file(path: Path, text: str, what: str) -> None:
    """Write a file; raise SmpkitError, which names `what`, where that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SmpkitError(f"the {what} cannot be written to `{path}`: {error.strerror}") from None
