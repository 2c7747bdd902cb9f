"""Which version this smpkit is, and which commit it was made from.

Builds load this file (`pyproject.toml`, `hatch_build.py`), so it imports nothing of smpkit.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path
from typing import Final

FILE: Final = "smpkit/_commit.txt"
"""Where builds write it; in a checkout, which an editable install leads to, there is no such file."""
_NAME: Final = re.compile(r"^name = \"smpkit\"$", re.MULTILINE)
_TAG: Final = re.compile(r"v(\d+)\.(\d+)\.(\d+)-(\d+)-g[0-9a-f]+")


def __getattr__(name: str) -> str:
    """Return `__version__`: what is installed, or of a folder that only stands on the path, that of its clone."""
    if name != "__version__":
        raise AttributeError(name)
    try:
        return importlib.metadata.version("smpkit")
    except importlib.metadata.PackageNotFoundError:
        return version_of()


def version_of(root: Path = Path(__file__).parents[1]) -> str:
    """Return `1.2.3` at the tag `v1.2.3`, `1.2.4.dev5` five commits later, and where there is no tag `0.1.0.dev0`."""
    tag = _TAG.fullmatch(_described(root, "--tags", "--long", "--match=v[0-9]*") or "")
    if tag is None:
        return "0.1.0.dev0"
    major, minor, patch, commits = map(int, tag.groups())
    return f"{major}.{minor}.{patch + 1}.dev{commits}" if commits else f"{major}.{minor}.{patch}"


def commit(root: Path = Path(__file__).parents[1]) -> str | None:
    """Return the commit of the package `smpkit` in a folder, with `-dirty` where files had changed; None: not known."""
    written = root / FILE
    return written.read_text(encoding="ascii").strip() if written.is_file() else commit_of(root)


def commit_of(root: Path) -> str | None:
    """Ask git for the commit of a clone of smpkit."""
    return _described(root, "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _described(root: Path, *options: str) -> str | None:
    """Call `git describe`, where a folder is itself the root of a clone of smpkit; never about one around it."""
    project = root / "pyproject.toml"
    if not ((root / ".git").exists() and project.is_file() and _NAME.search(project.read_text(encoding="utf-8"))):
        return None
    # Hooks run with these set, and they lead to the repository that has the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    command = ["git", "describe", *options]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git, no commit or tag yet, or another user's clone
        return None
    return done.stdout.strip()
