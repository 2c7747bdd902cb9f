"""A plugin of pytest that writes down each test at once: what a killed process has reported is not lost.

A line of JSON is what `record.Test` holds, or `collected`: the tests that there are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.on_gpu.parts import JOURNAL

_MOST_TEXT: Final = 3000


def _write(**content: Any) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the one process that is told of all tests
        with Path(os.environ[JOURNAL]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:  # a file that cannot be imported
        _write(name=report.nodeid or "collection", outcome="error", text=report.longreprtext[-_MOST_TEXT:])


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(collected=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(name=nodeid, outcome="started")  # it may never end


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Set-up and tear-down only where they say more than the call.
    if report.when == "call" or report.outcome != "passed":
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        text = (report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext)[-_MOST_TEXT:]
        measured = dict(report.user_properties)
        _write(name=report.nodeid, outcome=outcome, seconds=report.duration, text=text, measured=measured)
