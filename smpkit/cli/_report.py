"""The file that is written when smpkit itself fails: versions, command and traceback, without the user's values."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import metadata

import smpkit
from smpkit.cli._commit import commit

__all__ = ["redacted", "versions", "write_report"]

_PACKAGES = ("click", "pydantic", "PyYAML", "torch", "boto3")


def write_report(error: BaseException, command: Sequence[str]) -> str | None:
    """Write the report to the folder for temporary files and return its path; None if even that fails."""
    lines = [f"{name} {version}" for name, version in versions().items()]
    text = "\n".join([*lines, f"command: {redacted(command)}", "", *traceback.format_exception(error)])
    try:
        descriptor, path = tempfile.mkstemp(prefix="smpkit-report-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return None
    return path


def versions() -> dict[str, str]:
    """Return the versions that a report needs, by name."""
    source = commit()
    known = {"smpkit": smpkit.__version__} | ({"commit": source} if source else {})
    known["Python"] = f"{sys.version.split()[0]} on {platform.platform()}"
    return known | {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def redacted(command: Sequence[str]) -> str:
    """Join a command without what follows `=`, which may be a key or a password."""
    return " ".join(f"{part.partition('=')[0]}=..." if "=" in part else part for part in command)
