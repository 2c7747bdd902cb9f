"""A plugin of pytest for `scripts/ci.py`: records what became of each test, and runs a tenth of them if asked."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

_LEFT: Final = dict[str, None]()
"""The tests that have not ended, in their order."""
_ENDED: Final = Counter[str]()
_REASONS: Final = Counter[str]()
"""Why tests were skipped."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, required=True, metavar="FILE", help="write here what became of the tests")
    parser.addoption("--tenth", metavar="COMMIT", help="run only a tenth of the tests: another one for another commit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = config.getoption("--tenth")
    if commit is None:
        return
    chosen, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        drawn = hashlib.sha256(f"{commit} {item.nodeid}".encode()).digest()
        (others if drawn[0] % 10 else chosen).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    _LEFT.update(dict.fromkeys(item.nodeid for item in session.items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    _LEFT.update(dict.fromkeys(ids))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _LEFT.pop(report.nodeid, None)
    if report.failed:
        _ENDED["failed" if report.when == "call" else "error"] += 1
    elif report.skipped:
        _ENDED["skipped"] += 1
        if isinstance(report.longrepr, tuple):
            _REASONS[report.longrepr[2].removeprefix("Skipped: ")] += 1
    elif report.when == "call":
        _ENDED["passed"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # which a worker has
        record = {"ended": _ENDED, "reasons": _REASONS, "left": [*_LEFT]}
        session.config.getoption("--record").write_text(json.dumps(record), encoding="utf-8")
