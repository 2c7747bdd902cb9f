"""Tracebacks that show the script's own lines."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import sysconfig
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
import torch.distributed as dist

from smpkit.errors import DeadlineError, RemoteError, SmpkitError
from smpkit.torch.core.runtime import state

_OURS: Final = (f"{Path(__file__).parents[1]}{os.sep}",)
_INSIDE: Final = (*_OURS, f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
"""Files whose lines are not the script's; our context managers lead through contextlib."""
_LIBRARIES: Final = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib", "stdlib"))
_OF_DTENSORS: Final = re.compile(
    "mixed torch.Tensor and DTensor|FSDP does not support deepcopy|Sharding propagation failed"
    "|data pointer on an invalid python storage"
)
"""Torch's words where code takes DTensors for plain tensors; safetensors, which saves, asks for the pointer."""
_CALLERS: Final = frozenset({"__torch_function__", "run", "run_on_owner", "_run_call"})
"""Our functions that call an operation of the script, which has no Python frame of its own (`x @ y`)."""


def shorten(error: BaseException) -> None:
    """Remove the frames between the script's lines from an error's traceback, and from those of its causes.

    Between two lines of a script over a pipeline (the step, the layer that raised) lie dozens of smpkit and torch. What
    a torch operation did after the last of them stays. An unexpected error of smpkit stays whole: there the frames in
    between show the defect.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _shortened(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _shortened(error: BaseException) -> TracebackType | None:
    frames = _frames(error.__traceback__)
    if not frames or isinstance(error, DeadlineError | RemoteError):
        return script_frames(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if _is_in(frame, _OURS)]
    if ours and ours[-1] == len(frames) - 1:
        is_expected = isinstance(error, SmpkitError) or frames[-1].tb_frame.f_code.co_name in _CALLERS
        return script_frames(error.__traceback__) if is_expected else error.__traceback__
    of_script = [number for number, frame in enumerate(frames) if not _is_in(frame, _INSIDE)]
    if not of_script:
        return error.__traceback__
    last = max(of_script + ours)
    return _chained([frame for number, frame in enumerate(frames) if number > last or number in of_script])


def script_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames inside smpkit and torch; unchanged if it has no others.

    Every rank that has lost another one prints a traceback. Where its script was matters; the hundred lines of smpkit
    below say nothing about the rank that failed.
    """
    return _chained([frame for frame in _frames(traceback) if not _is_in(frame, _INSIDE)]) or traceback


def place_in_script(traceback: TracebackType | None = None) -> str:
    """Return where the script is, or an error was: ``train.py, line 7 (`loss = train_step(x)`)``; empty if unknown."""
    frame = None if traceback else sys._current_frames().get(threading.main_thread().ident or 0)
    places = [(frame.tb_frame.f_code.co_filename, frame.tb_lineno) for frame in reversed(_frames(traceback))]
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    places = [place for place in places if not place[0].startswith(_INSIDE)]
    # A line of a library that calls us, such as a trainer, says less than that of the script around it.
    for path, line in [place for place in places if not place[0].startswith(_LIBRARIES)] + places:
        text = linecache.getline(path, line).strip()
        return f"{Path(path).name}, line {line}" + (f" (`{text}`)" if text else "")
    return ""


def explain_parts(error: BaseException) -> None:
    """Add to an error of Python or torch that it comes of a weight, or gradient, of which this rank has a part or none.

    Code between steps that goes through `model.parameters()` meets those of all ranks.
    """
    if not state.initialized:
        return
    if state.cfg.sharded_data_parallel_degree > 1 and _OF_DTENSORS.search(str(error)):
        error.add_note(
            "Sharded data parallelism has made DTensors of the weights and their gradients, and its modules are not"
            " copied: for averages of weights (EMA, SWA) copy each of `model.parameters()` after smp.DistributedModel,"
            " and let all ranks call `model.state_dict()` for plain tensors, as to save."
        )
    shards = state.cfg.shard_optimizer_state and state.dp_size > 1
    if (shards or state.pp_size > 1) and "NoneType" in str(error) and "grad" in place_in_script(error.__traceback__):
        error.add_note(
            "`grad` is None on this rank for weights whose gradients other ranks have: "
            + ("leave the update to smp.DistributedOptimizer." if shards else "go through `model.local_parameters()`.")
        )


def collective_of_torch(traceback: TracebackType | None) -> tuple[str, list[int]] | None:
    """Return the function of `torch.distributed` that raised, and the ranks that it calls; None for other errors."""
    for frame in _frames(traceback)[-1:]:
        if _is_in(frame, (f"{Path(dist.__file__).parent}{os.sep}",)):
            group = frame.tb_frame.f_locals.get("group")
            ranks = dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None)
            return f"torch's {frame.tb_frame.f_code.co_name}", ranks
    return None


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
