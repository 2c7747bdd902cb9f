"""Tracebacks that show the script's own lines."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from smpkit.errors import DeadlineError, RemoteError, SmpkitError

__all__ = ["script_frames", "shorten"]

_OURS: Final = (f"{Path(__file__).parents[1]}{os.sep}",)
_INSIDE: Final = (*_OURS, f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
"""Where no line is the script's; a `with` of ours leads through contextlib."""
_CALLERS: Final = frozenset({"__torch_function__", "run", "run_on_owner"})
"""Our functions that call an operation which the script has written, one without lines of its own (`x @ y`)."""


def shorten(error: BaseException) -> None:
    """Leave out of an error's traceback, and of those behind it, how the script's lines came to be called.

    Between two lines of a script over a pipeline (the step, the layer that raised) lie dozens of smpkit's and torch's.
    What an operation of torch's did after the last of them stays. So does all of an error that smpkit has not
    foreseen: there the lines in between are what it is about.
    """
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = _shortened(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _shortened(error: BaseException) -> TracebackType | None:
    frames = _frames(error.__traceback__)
    if not frames or isinstance(error, DeadlineError | RemoteError):
        return script_frames(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if _is_in(frame, _OURS)]
    if ours and ours[-1] == len(frames) - 1:
        foreseen = isinstance(error, SmpkitError) or frames[-1].tb_frame.f_code.co_name in _CALLERS
        return script_frames(error.__traceback__) if foreseen else error.__traceback__
    theirs = [number for number, frame in enumerate(frames) if not _is_in(frame, _INSIDE)]
    if not theirs:
        return error.__traceback__
    after = max(theirs + ours)
    return _chained([frame for number, frame in enumerate(frames) if number > after or number in theirs])


def script_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames inside smpkit and torch; as it is if it has no others.

    A rank that has lost another one shows where its script was. How smpkit came to wait there is a hundred lines that
    say nothing of the rank that failed, printed by every rank.
    """
    return _chained([frame for frame in _frames(traceback) if not _is_in(frame, _INSIDE)]) or traceback


def _frames(traceback: TracebackType | None) -> list[TracebackType]:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _is_in(frame: TracebackType, folders: tuple[str, ...]) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(folders)


def _chained(frames: list[TracebackType]) -> TracebackType | None:
    chained: TracebackType | None = None
    for frame in reversed(frames):
        chained = TracebackType(chained, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return chained
