"""Become smpkit's launcher: it is in the image, and reads everything from /opt/ml. Needs nothing but Python."""

from __future__ import annotations

import importlib.util
import os
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("smpkit_container") is None:
        sys.exit("error: smpkit is not in this image\nhint: install it there with `pip install 'smpkit[torch]'`")
    os.execv(sys.executable, [sys.executable, "-m", "smpkit_container", "train"])  # noqa: S606  no shell is wanted
