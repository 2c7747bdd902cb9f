"""Which commit this smpkit was made from; `hatch_build.py` loads this file, so it imports nothing of smpkit."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

FILE: Final = "smpkit/_commit.txt"
"""Where builds write it; in a checkout, which an editable install leads to, there is no such file."""
_NAME: Final = re.compile(r"^name = \"smpkit\"$", re.MULTILINE)


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the package `smpkit` in a folder, with `-dirty` where files had changed; None: not known."""
    written = root / FILE
    return written.read_text(encoding="ascii").strip() if written.is_file() else commit_of(root)


def commit_of(root: Path) -> str | None:
    """Ask git, where a folder is itself the root of a clone of smpkit, and never about a repository around it."""
    project = root / "pyproject.toml"
    if not ((root / ".git").exists() and project.is_file() and _NAME.search(project.read_text(encoding="utf-8"))):
        return None
    # Hooks run with these set, and they lead to the repository that has the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_CEILING_DIRECTORIES": str(root.resolve().parent)}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git, no commit yet, or another user's clone
        return None
    return done.stdout.strip()
