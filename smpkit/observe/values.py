"""The values of a run, as a file of lines in its folder: one for each call of `smp.log`, and for each loss of a step.

::

    values.jsonl   {"step": 12, "time": 1732530000.1, "values": {"loss": 1.95, "lr": 0.0003}}
                   {"step": 13, "time": 1732530000.2, "values": {"loss": 1.94}, "by": "step"}

JSON has no infinity: what is not finite is one of the texts `NaN`, `Infinity` and `-Infinity`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smpkit.observe.runs import VALUES

LOSS: Final = "loss"
"""The name that is shown before all others."""


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
        path = run / VALUES
        lines = list(_lines(path))
        self.last_step = next((logged.step for logged, by_script in reversed(lines) if by_script), 0)
        """The step of the last line that the script logged; 0 if there is none."""
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # somebody was killed while writing

    def write(self, logged: Logged, *, by_script: bool = True) -> None:
        """Add a line."""
        values = {name: v if math.isfinite(v) else json.dumps(v) for name, v in logged.values.items()}
        line = {"step": logged.step, "time": round(logged.time, 3), "values": values}
        self._file.write(json.dumps(line if by_script else {**line, "by": "step"}) + "\n")
        self._file.flush()
        if by_script:
            self.last_step = logged.step

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def read_values(run: Path) -> tuple[Logged, ...]:
    """Return what was logged in a run, in the order of the calls; damaged and half-written lines are left out."""
    return tuple(logged for logged, _ in _lines(run / VALUES))


def _lines(path: Path) -> Iterator[tuple[Logged, bool]]:
    """Yield the lines, and whether the script logged them itself."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            item = json.loads(line)
            values = {name: float(value) for name, value in item["values"].items()}
            yield Logged(int(item["step"]), float(item["time"]), values), "by" not in item
