"""Tracebacks that show the script's own lines."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

__all__ = ["of_the_script"]

_INSIDE: Final = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames inside smpkit and torch; as it is if it has no others.

    A rank that has lost another one shows where its script was. How smpkit came to wait there is a hundred lines that
    say nothing of the rank that failed, printed by every rank.
    """
    found, frame = [], traceback
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_INSIDE):
            found.append(frame)
        frame = frame.tb_next
    kept: TracebackType | None = None
    for each in reversed(found):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or traceback
