"""Work counted in lines of Python: the same on every machine, however busy, where seconds are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_of(function: Callable[[], object]) -> int:
    """Return how many lines of Python run in `function`, in everything that it calls too."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
