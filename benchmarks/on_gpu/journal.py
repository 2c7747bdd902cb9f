"""A plugin of pytest that writes down each test at once: what a killed process has reported is not lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.on_gpu.parts import JOURNAL

__all__ = ["Journal"]

_MOST_TEXT: Final = 3000


class Journal:
    """One line of JSON per event."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **content: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self._write(
                test=report.nodeid or "collection", outcome="error", seconds=0.0, text=_end(report.longreprtext)
            )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what there is to run."""
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note what runs, in case that it never ends."""
        self._write(test=nodeid, outcome="started", seconds=0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how it ended; set-up and tear-down only where they say more than the call."""
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            found = dict(report.user_properties)
            self._write(test=report.nodeid, outcome=outcome, seconds=report.duration, text=_end(text), found=found)


def pytest_configure(config: pytest.Config) -> None:
    """Take part, in the process that hears of all tests."""
    path = os.environ.get(JOURNAL)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Journal(Path(path)))


def _end(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"...{text[-_MOST_TEXT:]}"
