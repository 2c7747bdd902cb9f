"""Make hyperparameters safe for SDK v3, whose start script puts them unquoted into a shell file.

A value with an apostrophe, or a name that is not a valid variable name, makes that file fail to load, and so the job.
Those are combined into one hyperparameter, as JSON in JSON without apostrophes, which our launcher unpacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

__all__ = ["PACKED", "packed"]

PACKED = "sagemaker_smpkit_packed"

_SAFE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def packed(sent: Mapping[str, str]) -> dict[str, str]:
    """Return encoded hyperparameters, the unsafe ones combined into one."""
    unsafe = {name: json.loads(text) for name, text in sent.items() if not _is_safe(name, text)}
    safe = {name: text for name, text in sent.items() if name not in unsafe}
    if not unsafe:
        return safe
    inner = json.dumps(unsafe).replace("'", "\\u0027")
    return {**safe, PACKED: json.dumps(inner)}


def _is_safe(name: str, text: str) -> bool:
    return _SAFE_NAME.fullmatch(name) is not None and "'" not in text
