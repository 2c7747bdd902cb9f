"""The scalars that steps return and the script reduces, such as the loss: noted on rank 0 without a call of `smp.log`.

`reduce_mean()` only starts a copy to the host. It is read when it has arrived, at a later step or at the end, so that
no step waits for it. A name that the script logs itself is not noted again.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from smpkit.observe.runs import RUN_DIR
from smpkit.observe.values import LOSS, Logged, ValueWriter
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state

__all__ = ["Label", "ends", "is_main", "last_step", "log", "note"]


_log = logging.getLogger("smpkit")


@dataclass(frozen=True)
class Label:
    """What a scalar is called, and the step that returned it, from 0."""

    name: str
    step: int


@dataclass(frozen=True)
class _Copy:
    """A scalar on its way to the host; `arrived` is None if it is there."""

    host: torch.Tensor
    arrived: torch.Event | None


class _Values:
    """What is known of one job."""

    def __init__(self) -> None:
        self.under_way = defaultdict[Label, list[_Copy]](list)
        """Evaluation calls a step for each of its batches; their mean is written."""
        self.logged = set[str]()
        """Names that the script logs itself."""
        self.main: str | None = None
        """The first step function that trains: what it returns is the loss."""
        self.ends: dict[str, tuple[float, float]] = {}
        self._file: ValueWriter | None = None
        self._is_warned = False

    def file(self) -> ValueWriter | None:
        """Return the file of the run, opened when it is needed; None outside a run."""
        folder = os.environ.get(RUN_DIR)
        if self._file is None and folder:
            self._file = ValueWriter(Path(folder))
        return self._file

    def close(self) -> None:
        self.read()
        if self._file is not None:
            self._file.close()

    def write(self, values: Mapping[str, float], step: int, *, by_script: bool) -> None:
        for name, value in values.items():
            self.ends[name] = self.ends.get(name, (value, value))[0], value
        try:
            if (file := self.file()) is not None:
                file.write(Logged(step, time.time(), values), by_script=by_script)
        except OSError as error:
            if by_script:
                raise
            if not self._is_warned:  # nobody asked for it: training is worth more
                self._is_warned = True
                _log.warning("losses are not recorded: the folder of the run cannot be written: %s", error.strerror)

    def read(self, before: float = math.inf, *, wait: bool = False) -> None:
        """Write what has arrived of steps before this one; with `wait`, what is under way, too."""
        for label, copies in list(self.under_way.items()):
            if label.step >= before:
                return
            last = copies[-1].arrived  # copies arrive in order
            if last is not None and not last.query():
                if not wait:
                    return
                last.synchronize()
            del self.under_way[label]
            mean = sum(float(copy.host) for copy in copies) / len(copies)
            self.write({label.name: mean}, label.step, by_script=False)


_values: _Values | None = None


def _open() -> _Values:
    global _values  # noqa: PLW0603 - one of a process, which is one rank
    if _values is None:
        _values = _Values()
    return _values


def is_main(function: str) -> bool:
    """Tell whether a step function that trains is the first one of the job."""
    values = _open()
    values.main = values.main or function
    return values.main == function


def note(label: Label, value: torch.Tensor) -> None:
    """Take a scalar that the script has reduced; only rank 0 calls this."""
    values = _open()
    values.read(label.step)  # those of this step may still be logged by the script
    if label.name not in values.logged:
        host = value.detach().to("cpu", non_blocking=True)
        values.under_way[label].append(_Copy(host, devices.record_event(value.device)))


def log(logged: Mapping[str, float], step: int) -> None:
    """Write what the script logs itself."""
    values = _open()
    values.logged |= logged.keys()
    for label in [label for label in values.under_way if label.name in logged]:
        del values.under_way[label]
    values.write(logged, step, by_script=True)


def last_step() -> int:
    """Return the last step that the script has logged in the folder of the run; 0 if there is none."""
    file = _open().file()
    return 0 if file is None else file.last_step


def ends() -> dict[str, tuple[float, float]]:
    """Return the first and the last value of each name, the loss first, after a wait for those under way."""
    if _values is None:
        return {}
    _values.read(wait=True)
    return {name: _values.ends[name] for name in sorted(_values.ends, key=lambda name: name != LOSS)}


def _close() -> None:
    """Write no more, and wait for nothing: after a failure, what is under way may never arrive."""
    global _values
    closing, _values = _values, None
    if closing is not None:
        closing.close()


def _finish() -> None:
    ends()


state.end_hooks.append(_finish)
state.reset_hooks.append(_close)
