"""Requests as SageMaker's own SDK v2 sends them: the arguments in `cases.py`, the requests in the JSON files.

That of `no-distribution` is whole. Each other file says what its arguments change in it: a JSON merge patch (RFC 7396).
`make.py` writes them by driving the real SDK with an S3 of moto's; `scripts/test-sdk sdk2` compares them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLAIN = "no-distribution"


def recorded() -> dict[str, dict[str, Any]]:
    """Return the whole request of every case."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("*.json")}
    return {name: content if name == PLAIN else _merged(files[PLAIN], content) for name, content in files.items()}


def _merged(before: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    inner = {key for key, value in patch.items() if isinstance(value, dict) and key in before}
    both = {**before, **patch, **{key: _merged(before[key], patch[key]) for key in inner}}
    return {key: value for key, value in both.items() if value is not None}
