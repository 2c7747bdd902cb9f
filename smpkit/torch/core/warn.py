"""Warn the user: once per job, at the line of the script that led here."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist

from smpkit.observe.runs import RUN_DIR, WARNINGS
from smpkit.torch.core.runtime import state

ScriptLine = tuple[str, int]
"""A file and the number of a line in it."""

_OURS: Final = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
"""Where smpkit and torch lie."""
_LIBRARIES: Final = (
    *_OURS,
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",  # code without a file, such as `<frozen importlib._bootstrap>`
)
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def warn_user(text: str, line: ScriptLine | None = None, by_rank: int = 0) -> None:
    """Warn with a UserWarning that names a line of the script: smpkit's own lines say nothing to its user.

    All warnings of smpkit.torch go through here. Only one rank warns: what all ranks find must not stand in the log
    once for each.

    Args:
        line: None: the line that is running now.
        by_rank: the rank that warns.
    """
    if _rank() != by_rank:
        return
    _keep(text, by_rank)
    if line is not None:
        warnings.warn_explicit(text, UserWarning, *line)
        return
    frame = _script_frame(sys._getframe(1))
    names = frame.f_globals
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=str(names.get("__name__", "<unknown>")),
        registry=names.setdefault("__warningregistry__", {}),
    )


def _keep(text: str, rank: int) -> None:
    """Keep a warning in the folder of the run, if there is one that takes it: it is in the log anyway."""
    if folder := os.environ.get(RUN_DIR):
        line = json.dumps({"rank": rank, "time": time.time(), "text": text}) + "\n"
        with contextlib.suppress(OSError), (Path(folder) / WARNINGS).open("a", encoding="utf-8") as file:
            file.write(line)


def script_line() -> ScriptLine:
    """Return the line of the script that runs now."""
    frame = _script_frame(sys._getframe(1))
    return frame.f_code.co_filename, frame.f_lineno


def _script_frame(here: FrameType) -> FrameType:
    """Return the innermost frame of the script; where a library called smpkit from a thread, that of the library."""
    frames = [frame for frame, _ in traceback.walk_stack(here)]
    for is_inside in (_is_library, _is_ours):
        for frame in frames:
            if not is_inside(frame.f_code.co_filename):
                return frame
    return here


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS)


def _rank() -> int:
    if state.initialized:
        return state.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
