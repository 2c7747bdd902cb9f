"""Write the golden files: `python -m tests.estimator.golden.make`, in an environment with SDK v2 and moto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.estimator.golden import PLAIN
from tests.estimator.golden.real_sdk2 import requests_of_the_sdk


def main() -> None:
    requests = requests_of_the_sdk()
    for name, request in requests.items():
        content = request if name == PLAIN else _patch(requests[PLAIN], request)
        path = Path(__file__).with_name(f"{name}.json")
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch that makes `after` of `before`."""
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    inner = {key: _patch(before[key], value) for key, value in changed.items() if isinstance(before.get(key), dict)}
    return {**{key: None for key in before if key not in after}, **changed, **inner}


if __name__ == "__main__":
    main()
