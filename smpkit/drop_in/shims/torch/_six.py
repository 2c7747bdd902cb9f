"""What torch 1.x kept for Python 2, and torch 2 removed."""

import collections.abc
import math

inf, nan = math.inf, math.nan
string_classes = (str, bytes)
int_classes = int
container_abcs = collections.abc
PY3 = PY37 = True
