"""Read a configuration file, whatever is in it: a document, or one plain error."""

from __future__ import annotations

from pathlib import Path

from smpkit.config.document import Document, refuse
from smpkit.config.json_text import parse_json
from smpkit.config.words import printable, suggestion
from smpkit.config.yaml_text import parse_yaml

__all__ = ["read_document", "similar"]

_MAX_BYTES = 1 << 20


def read_document(path: Path, name: str | None = None) -> Document:
    """Read a file: strict JSON if it is called `.json`, YAML 1.2 (core schema) otherwise.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, or has a syntax error.
    """
    shown = printable(str(path)) if name is None else name
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        refuse(
            shown,
            f"cannot be read: {_reason(error)}",
            hint=similar(path) if isinstance(error, FileNotFoundError) else None,
        )
    if len(data) > _MAX_BYTES:
        refuse(shown, f"is too large for a configuration (more than {_MAX_BYTES >> 20} MiB)")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        refuse(shown, f"is not UTF-8 text: byte 0x{data[error.start]:02x} on line {line}", hint="save it as UTF-8")
    return (parse_json if path.suffix.lower() == ".json" else parse_yaml)(text, shown)


def similar(path: Path) -> str | None:
    """The hint `did you mean ...?` for a path that is not there: a name beside it that looks like it."""
    try:
        found = suggestion(path.name, (each.name for each in path.parent.iterdir() if each.name.isprintable()))
    except OSError:
        return None
    return found


def _reason(error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return reason[:1].lower() + reason[1:]
