"""Which tests come past a place: `hit` is called there, in whatever process, and the hooks below run in pytest's.

`scripts/mutants --map` copies this to where all processes of a run find it. A process that a test has started, whatever
its environment, is known by its ancestors, of which one is pytest's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

try:
    from mutants_folder import HITS  # type: ignore[import-not-found]  # made for the run
except ImportError:
    HITS = "."
_FOLDER = Path(HITS)
_known: set[tuple[str, str]] = set()
_done: dict[str, int] = {}
"""In a process that a test has started, where each mutant was noted: it runs for no other test."""
_durations: dict[str, float] = {}


def hit(mutant: str) -> None:
    """Note that the present test has come to a mutant's place."""
    if _done.get(mutant) == os.getpid():
        return
    if not (_FOLDER / f"test-{os.getpid()}").exists():
        _done[mutant] = os.getpid()
    test = _present_test()
    if test and (mutant, test) not in _known:
        _known.add((mutant, test))
        with (_FOLDER / f"hit-{mutant}").open("a") as file:
            file.write(f"{test}\n")


def _present_test() -> str:
    """Return the test that this process, or the one that has started it, runs now."""
    pid = os.getpid()
    while pid > 1:
        try:
            return (_FOLDER / f"test-{pid}").read_text()
        except OSError:
            pass
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return ""


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say which test begins; what its fixtures do may serve all tests of the file."""
    _note(nodeid.partition("::")[0])


def pytest_runtest_call(item: Any) -> None:
    """Say that the test itself runs now."""
    _note(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Note how long a test took that has passed."""
    if report.when == "setup":
        _durations[report.nodeid] = report.duration
    elif report.when == "call" and report.outcome == "passed":
        with (_FOLDER / f"passed-{os.getpid()}").open("a") as file:
            file.write(f"{_durations[report.nodeid] + report.duration:.2f} {report.nodeid}\n")


def _note(test: str) -> None:
    path = _FOLDER / f"test-{os.getpid()}"
    fresh = path.with_suffix(".new")
    fresh.write_text(test)
    fresh.replace(path)
