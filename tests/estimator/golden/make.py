"""Write the golden files: `python -m tests.estimator.golden.make`, in an environment with SDK v2 and moto."""

from __future__ import annotations

import json
from pathlib import Path

from tests.estimator.golden.real_sdk2 import requests_of_the_sdk


def main() -> None:
    for name, request in requests_of_the_sdk().items():
        path = Path(__file__).with_name(f"{name}.json")
        path.write_text(json.dumps(request, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
