"""Become smpkit's launcher: it is in the image, and reads everything from /opt/ml. Needs nothing but Python.

With the argument `check`, only look whether it is there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

_MISSING = "smpkit is not in this image"
_FAILURE = Path("/opt/ml/output/failure")


def main() -> None:
    if importlib.util.find_spec("smpkit_container") is None:
        with contextlib.suppress(OSError):  # what SageMaker shows as the reason; the log says it anyway
            _FAILURE.parent.mkdir(parents=True, exist_ok=True)
            _FAILURE.write_text(f"{_MISSING}; install it there with `pip install 'smpkit[torch]'`", encoding="utf-8")
        sys.exit(f"error: {_MISSING}\nhint: install it there with `pip install 'smpkit[torch]'`")
    if sys.argv[1:] != ["check"]:
        os.execv(sys.executable, [sys.executable, "-m", "smpkit_container", "train"])  # noqa: S606  no shell is wanted


if __name__ == "__main__":
    main()
