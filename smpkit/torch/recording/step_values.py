"""The scalars that steps return and the script reduces, such as the loss: noted on rank 0 without a call of `smp.log`.

`reduce_mean()` only starts a copy to the host. It is read when it has arrived, at a later step or at the end, so that
no step waits for it. A name that the script logs itself is not noted again.
"""

from __future__ import annotations

import functools
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

_log = logging.getLogger("smpkit")


@dataclass(frozen=True)
class Label:
    """What a scalar is called, and the step that returned it, from 0."""

    name: str
    step: int


class StepValues:
    """The scalars of one job, on rank 0."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[float, float]] = {}
        self._under_way = defaultdict[Label, list[tuple[torch.Tensor, torch.Event | None]]](list)
        """Scalars on their way to the host, and what tells that they are there. Evaluation calls a step for each of its
        batches; their mean is written."""
        self._logged = set[str]()
        """Names that the script logs itself."""
        self._main: str | None = None
        """The first step function that trains: what it returns is the loss."""
        self._is_warned = False

    @functools.cached_property
    def _file(self) -> ValueWriter | None:
        """The file of the run, opened when it is needed; None outside a run."""
        folder = os.environ.get(RUN_DIR)
        return ValueWriter(Path(folder)) if folder else None

    def is_main(self, function: str) -> bool:
        """Tell whether a step function that trains is the first one of the job."""
        self._main = self._main or function
        return self._main == function

    def note(self, label: Label, value: torch.Tensor) -> None:
        """Take a scalar that the script has reduced; only rank 0 calls this."""
        self._read(label.step)  # those of this step may still be logged by the script
        if label.name not in self._logged:
            # A copy on the host, too: scripts go on with the scalar in place, as `dist.all_reduce` does.
            host = value.detach().to("cpu", non_blocking=True, copy=True)
            self._under_way[label].append((host, devices.record_event(value.device)))

    def log(self, logged: Mapping[str, float], step: int) -> None:
        """Write what the script logs itself."""
        self._logged |= logged.keys()
        for label in [label for label in self._under_way if label.name in logged]:
            del self._under_way[label]
        self._write(logged, step, by_script=True)

    def last_step(self) -> int:
        """Return the last step that the script has logged in the folder of the run; 0 if there is none."""
        return 0 if self._file is None else self._file.last_step

    def ends(self) -> dict[str, tuple[float, float]]:
        """Return the first and the last value of each name, the loss first, after a wait for those under way."""
        self._read(wait=True)
        return {name: self._ends[name] for name in sorted(self._ends, key=lambda name: name != LOSS)}

    def _read(self, before: float = math.inf, *, wait: bool = False) -> None:
        """Write what has arrived of steps before this one; with `wait`, what is under way, too."""
        for label, copies in list(self._under_way.items()):
            if label.step >= before:
                return
            _, last = copies[-1]  # they arrive in order
            if last is not None and not last.query():
                if not wait:
                    return
                last.synchronize()
            del self._under_way[label]
            mean = sum(float(host) for host, _ in copies) / len(copies)
            self._write({label.name: mean}, label.step, by_script=False)

    def close(self) -> None:
        """Write no more, and wait for nothing: after a failure, what is under way may never arrive."""
        self._read()
        if self.__dict__.get("_file") is not None:
            self.__dict__["_file"].close()

    def _write(self, values: Mapping[str, float], step: int, *, by_script: bool) -> None:
        for name, value in values.items():
            self._ends[name] = self._ends.get(name, (value, value))[0], value
        try:
            if self._file is not None:
                self._file.write(Logged(step, time.time(), values), by_script=by_script)
        except OSError as error:
            if by_script:
                raise
            if not self._is_warned:  # nobody asked for it: training is worth more
                self._is_warned = True
                _log.warning("losses are not recorded: the folder of the run cannot be written: %s", error.strerror)


@functools.cache
def current_values() -> StepValues:
    """Return the values of this job, of which this process is one rank."""
    return StepValues()


def _finish() -> None:
    current_values().ends()


def _close() -> None:
    current_values().close()
    current_values.cache_clear()


state.end_hooks.append(_finish)
state.reset_hooks.append(_close)
