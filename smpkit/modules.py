"""Run our modules in processes of their own, from where they are installed."""

from __future__ import annotations

import sys


def module_command(module: str) -> list[str]:
    """Return how to run a module: not from the current folder, where a user's `json.py` may stand in the way."""
    return [sys.executable, "-P", "-m", module]
