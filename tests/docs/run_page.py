"""Run a page's Python blocks in one namespace, as a rank; errors name the page and its lines."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_blocks(parts: Sequence[tuple[str, int, str]], folder: Path, variables: dict[str, str]) -> None:
    """Run sources, each with its name and the number of its first line, in a folder."""
    os.chdir(folder)
    os.environ.update(variables)
    sys.path.insert(0, str(folder))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (page, line, source) in enumerate(parts):
        name = f"<{page}, block {number}>"
        padded = "\n" * (line - 1) + source
        linecache.cache[name] = (len(padded), None, padded.splitlines(keepends=True), name)
        exec(compile(padded, name, "exec"), names)
