"""The `smdistributed` package of SMP v1: where it lies, which scripts ask for it, and what it shows.

It lies in `path/`, which nothing puts on the module search path but `smpkit compat` and the launcher, and those only
where no real one is installed: images of AWS own that name.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

DROP_IN_PATH: Final = Path(__file__).parent / "path"
"""The folder to put on the module search path; it holds a namespace package, so that another product's part of
`smdistributed` (`smdistributed.dataparallel`) may lie elsewhere."""

STARTUP_PATH: Final = Path(__file__).parent / "startup"
"""The folder whose `sitecustomize` prepares a process."""

_MAX_FILES: Final = 2000
_MAX_BYTES: Final = 2 << 20
_IMPORTS: Final = re.compile(
    r"""^\s*(?:from|import)\s+smdistributed\b|(?:import_module|find_spec|__import__)\(\s*["']smdistributed\b""", re.M
)
_TRAINER: Final = re.compile(
    r"^\s*from\s+transformers\b[^\n]*\bimport\b(?:[^\n(#]*|\s*\([^)]*)Train(?:er|ingArguments)\b"
    r"|\btransformers\.\w*Train(?:er|ingArguments)\b",
    re.M,
)
_SKIPPED: Final = {"site-packages", "node_modules", "__pycache__", "venv"}


def with_drop_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for processes that run a script of SMP v1.

    The drop-in is on `PYTHONPATH`: last, so that nothing of the user's is hidden by it. The start-up module is first.
    """
    return with_startup(environ, last=[str(DROP_IN_PATH)])


def with_startup(environ: Mapping[str, str], last: Sequence[str] = ()) -> dict[str, str]:
    """Return `environ` for processes that prepare what they import: `smpkit.drop_in.after_import`."""
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = dict.fromkeys([str(STARTUP_PATH), *entries, *last])
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def installed_one(search: Sequence[str] | None = None) -> Path | None:
    """Return where a model-parallel library of that name is installed that is not this one; None if nowhere.

    Looks without importing anything of it, in folders that are those of this interpreter by default.
    """
    spec = importlib.machinery.PathFinder.find_spec("smdistributed", list(sys.path if search is None else search))
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        if (folder / "modelparallel").is_dir() and folder.parent != DROP_IN_PATH:
            return folder / "modelparallel"
    return None


def asks_for_it(code: Path, mp_parameters: Mapping[str, Any]) -> Path | None:
    """Return the first source file below `code` that asks for `smdistributed`, or None.

    It asks by importing it, or, when `mp_parameters` has the key `partitions`, by using Hugging Face's `Trainer`: that
    trains with SMP v1 if it has such parameters and finds a package of this name.
    """
    through_trainer = "partitions" in mp_parameters
    for path in sources(code):
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size <= _MAX_BYTES else ""
        except OSError:
            continue
        if "smdistributed" in text and _IMPORTS.search(text):
            return path
        if through_trainer and "transformers" in text and _TRAINER.search(text):
            return path
    return None


def sources(code: Path) -> Iterator[Path]:
    """Yield Python files, top folder first, without what is installed or hidden there."""
    num_lines = 0
    for folder, folders, files in os.walk(code):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)
                num_lines += 1
                if num_lines >= _MAX_FILES:
                    return
