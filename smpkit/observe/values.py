"""The values of a run, as a file of lines in its folder: one for each call of `smp.log`, and for each loss of a step.

::

    values.jsonl   {"step": 12, "time": 1732530000.1, "values": {"loss": 1.95, "lr": 0.0003}}
                   {"step": 13, "time": 1732530000.2, "values": {"loss": 1.94}, "by": "step"}

JSON has no infinity: what is not finite is one of the texts `NaN`, `Infinity` and `-Infinity`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smpkit.observe.runs import VALUES

__all__ = ["LOSS", "Logged", "ValueWriter", "read_values"]

LOSS: Final = "loss"
"""The name that is shown before all others."""
_TAIL_BYTES: Final = 1 << 20
_BY_STEP: Final = ', "by": "step"}'


@dataclass(frozen=True)
class Logged:
    """One line."""

    step: int
    time: float
    """Seconds since 1970."""
    values: Mapping[str, float]


class ValueWriter:
    """Adds lines to the file of a run, each as soon as it is logged; a run that goes on adds to what is there."""

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._path = run / VALUES
        self.last_step = _last_step(self._path)
        """The step of the last line that the script logged; 0 if there is none."""
        self._file = self._path.open("a", encoding="utf-8")
        if self._file.tell() and not self._path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # somebody was killed while writing

    def write(self, logged: Logged, *, by_script: bool = True) -> None:
        """Add a line."""
        values = {name: _finite(value) for name, value in logged.values.items()}
        line = {"step": logged.step, "time": round(logged.time, 3), "values": values}
        if not by_script:
            line["by"] = "step"
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if by_script:
            self.last_step = logged.step

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def read_values(run: Path) -> tuple[Logged, ...]:
    """Return what was logged in a run, in the order of the calls; damaged and half-written lines are left out."""
    found = []
    try:
        text = (run / VALUES).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    for line in text.splitlines():
        logged = _parsed(line)
        if logged is not None:
            found.append(logged)
    return tuple(found)


def _parsed(line: str) -> Logged | None:
    try:
        item = json.loads(line)
        values = {str(name): float(value) for name, value in item["values"].items()}
        return Logged(int(item["step"]), float(item["time"]), values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _last_step(path: Path) -> int:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return 0
    steps = [logged.step for line in lines if not line.endswith(_BY_STEP) and (logged := _parsed(line)) is not None]
    return steps[-1] if steps else 0
