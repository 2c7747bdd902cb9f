"""Run our modules in processes of their own, from where they are installed."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["module_command"]

_AS_MODULE: Final = "import sys; del sys.path[0], sys.argv[0]; import runpy; runpy._run_module_as_main(sys.argv[0])"
"""All that `-m` does, but for the current folder."""


def module_command(module: str, version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """Return how to run a module: not from the current folder, where a user's `json.py` may stand in the way."""
    if version >= (3, 11):
        return [sys.executable, "-P", "-m", module]
    # Python 3.10 has no `-P`: its `-m` looks there first. So does its `-c`, which can forget it before it looks.
    return [sys.executable, "-c", _AS_MODULE, module]
