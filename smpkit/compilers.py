"""Which C++ compiler this machine has."""

from __future__ import annotations

import os
import shutil

NAMES = "CXX, c++, g++, clang++"
"""Where it is looked for, for messages."""


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: `CXX`, else c++, g++ or clang++; None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))), None)
