"""A plugin of pytest that writes down each test at once: what a killed process has reported is not lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.on_gpu.parts import JOURNAL

_MOST_TEXT: Final = 3000


class _Journal:
    """One line of JSON per event: the tests there are, or a `record.Test`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **content: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a file that cannot be imported
            text = report.longreprtext[-_MOST_TEXT:]
            self._write(name=report.nodeid or "collection", outcome="error", seconds=0.0, text=text)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(name=nodeid, outcome="started", seconds=0.0)  # it may never end

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Set-up and tear-down only where they say more than the call.
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            text = (report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext)[-_MOST_TEXT:]
            measured = dict(report.user_properties)
            self._write(name=report.nodeid, outcome=outcome, seconds=report.duration, text=text, measured=measured)


def pytest_configure(config: pytest.Config) -> None:
    """Write the journal in the one process that is told of all tests: no worker."""
    path = os.environ.get(JOURNAL)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Journal(Path(path)))
