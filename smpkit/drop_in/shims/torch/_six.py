"""What torch 1.x kept for Python 2, and torch 2 removed."""

from __future__ import annotations

import collections.abc
import math

__all__ = ["PY3", "PY37", "FileNotFoundError", "container_abcs", "inf", "int_classes", "nan", "string_classes"]

inf = math.inf
nan = math.nan
string_classes = (str, bytes)
int_classes = int
container_abcs = collections.abc
PY3 = True
PY37 = True
FileNotFoundError = FileNotFoundError  # noqa: A001, PLW0127  the name that scripts import from here
