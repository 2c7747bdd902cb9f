"""Run tests in a rank: the server that it is forked from has imported torch and all, which takes pytest seconds."""

from __future__ import annotations

import contextlib
import io

import pytest

__all__ = ["run_tests"]


def run_tests(arguments: list[str]) -> tuple[int, str]:
    """Return pytest's status and what it has written.

    What runs is imported here, so `env` of `run_ranks` holds for it; and this module imports nothing of theirs.
    """
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        status = pytest.main(["--capture=sys", "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments])
    return int(status), shown.getvalue()
