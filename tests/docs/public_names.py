"""What docs/reference/python lists: the objects that the site's pages of the API are made from."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PAGES: Final = Path(__file__).parents[2] / "docs/reference/python"
MODULES: Final = (
    "smpkit",
    "smpkit.errors",
    "smpkit.testing",
    "smpkit.testing.simulated_device",
    "smpkit.torch",
    "smpkit.torch.amp",
    "smpkit.torch.nn",
    "smpkit.torch.optimizers",
)
"""Modules whose `__all__` is public."""


def documented() -> Iterator[tuple[str, Any]]:
    """Yield every object that a page lists, and its path: functions, classes, and the members that are shown."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for path, options in re.findall(r"^::: ([\w.]+)\n((?: .*\n)*)", text, re.MULTILINE):
            module, _, name = path.rpartition(".")
            thing = getattr(importlib.import_module(module), name)
            yield path, thing
            for member in re.findall(r"^ +- (\w+)$", options, re.MULTILINE):
                yield f"{path}.{member}", getattr(thing, member)


def signature(thing: Any) -> str:
    """Return how a thing is called, without addresses of this process; empty where nothing says, or only Python."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return ""
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
    return re.sub(r" at 0x[0-9a-f]+", "", found)
