"""How names and values are shown in messages: on one line, short, and without control characters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from smpkit.config.confidential import hide_known
from smpkit.errors import escaped

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_RESET = "\x1b[0m"


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` was probably meant to be, if any."""
    lower = {candidate.lower(): candidate for candidate in candidates}
    # Two of three letters that changed places leave 0.67; longer names that are so little alike are other words.
    matches = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.7 if len(name) > 3 else 0.6)
    return lower[matches[0]] if matches else None


def duration(seconds: float) -> str:
    """Return a length of time as people say it: `0.8 s`, `42 s`, `4 m 12 s`, `3 h 5 m`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} m {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} m"


def suggestion(name: str, candidates: Iterable[str]) -> str | None:
    """The hint `did you mean ...?` for a name that is none of `candidates`."""
    meant = closest(name, candidates)
    return None if meant is None else f"did you mean `{meant}`?"


def typed(value: object) -> str:
    """Show a value with its kind where that matters: `true (a bool)`, `4` (text), `a list`."""
    kinds = {bool: "a bool", str: "text", float: "a float"}
    return next((f"{quoted(value)} ({kinds[kind]})" for kind in kinds if isinstance(value, kind)), quoted(value))


def quoted(value: object) -> str:
    """Show a value as it is written in a configuration file, on one line and at most about 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # str() of an integer above 4300 digits raises, and nobody wants to read one.
        return str(value) if value.bit_length() < 200 else "a huge number"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        value = hide_known(value)
        return f"`{printable(value if len(value) <= 60 else value[:57] + '...')}`"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, tuple):
        return "a tuple"
    return f"an object of type {type(value).__name__}"


def printable(text: str) -> str:
    """Escape control characters and what cannot be shown, so that a file's content cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def coloured(text: str) -> str:
    """Escape control sequences except colours: a log may hold some that set the title, the clipboard or the cursor.

    A colour that is still on at the end of the line is reset there.
    """
    parts = _COLOUR.split(text)
    if len(parts) == 1:
        return _escaped(text)
    shown = "".join(part if index % 2 else _escaped(part) for index, part in enumerate(parts))
    return shown if parts[-2] in (_RESET, "\x1b[m") else shown + _RESET


def plain(text: str) -> str:
    """Leave colours out and escape all other control sequences, line by line."""
    return escaped(_COLOUR.sub("", text))


def _escaped(line: str) -> str:
    return escaped(line).replace("\n", "\\n")
