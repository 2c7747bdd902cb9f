"""What CI runs: within an hour all tests that this machine can run, each kind in a part of its own.

A part that fails fails the run, and the others follow. Slow tests get the time that is left. At the end, a line for
each part says whether it passed, and why tests were skipped.

It needs nothing but Python: what the parts run makes their environments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final
from xml.etree import ElementTree as ET

ROOT: Final = Path(__file__).parents[1]
SECONDS: Final = 60 * float(os.environ.get("SMPKIT_CI_MINUTES", "60"))
TO_END: Final = 60
"""How many of these seconds a part may take to end when the time is over."""
NO_TESTS: Final = 5
"""How pytest exits if all are deselected."""

# What needs Docker, Slurm or a browser has a part of its own.
APART: Final = (
    "tests/docker",
    "tests/slurm/test_slurm.py",
    "tests/slurm/test_example.py::test_a_cluster_runs_it_and_it_goes_on_after_a_stop",
    "tests/observe/report/test_browser.py",
    "tests/docs/test_site_in_browser.py",
)
BUT_THESE: Final = tuple(f"--deselect={path}" for path in APART)


@dataclass
class Part:
    """One command, and what became of it."""

    name: str
    command: Sequence[str]
    options: Sequence[str] = ()
    """Options of pytest."""
    must_end: bool = False
    """Whether the run fails if there is no time for all of it."""
    outcome: str = "not reached"
    ended: Counter[str] = field(default_factory=Counter)
    """How many tests passed, failed, ..."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why tests were skipped."""

    def run(self, until: float) -> None:
        """Run it, until it ends or `time.monotonic()` is at that."""
        with tempfile.TemporaryDirectory(prefix="smpkit-ci-") as folder:
            record = Path(folder) / "junit.xml"
            status = _status(self.command, [f"--junitxml={record}", *self.options], until)
            if record.exists():
                self._count(ET.parse(record).getroot()[0])  # noqa: S314 - our own
        if self.ended["failed"] or self.ended["error"] or status not in (0, NO_TESTS, None):
            self.outcome = "failed"
        elif status is None:
            self.outcome = "failed" if self.must_end else "cut short"
        else:
            self.outcome = "skipped" if self.ended["skipped"] and not self.ended["passed"] else "passed"

    def _count(self, suite: ET.Element) -> None:
        number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        self.ended.update(failed=number["failures"], error=number["errors"], skipped=number["skipped"])
        self.ended["passed"] = number["tests"] - self.ended.total()
        self.reasons.update(skipped.get("message", "") for skipped in suite.iter("skipped"))

    def print(self) -> None:
        """Print what there is to say at the end."""
        print(f"{self.outcome:12} {self.name}", _sum(self.ended), sep=": " if self.ended.total() else "")
        for reason, number in self.reasons.items():
            print(f"    skipped {number}: {reason}")


def _status(command: Sequence[str], options: Sequence[str], until: float) -> int | None:
    """Return the exit status of a command; None if it was interrupted because the time is over."""
    environ = {**os.environ, "CI": "1", "PYTEST_ADDOPTS": " ".join(options)}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        return process.wait(max(0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # so that pytest says what it has done
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TO_END)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _sum(ended: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(ended.items()) if number)


def tests_of(changed: str, folders: set[str]) -> str:
    """Return which of the folders has the tests of a changed file; empty if none has.

    Those of smpkit/torch/offload/engine.py are in tests/torch/offload, or else in tests/torch.
    """
    path = PurePosixPath("tests", *PurePosixPath(changed.replace("smpkit_", "")).parts[1:])
    return next((str(folder) for folder in path.parents if str(folder) in folders), "")


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def parts() -> list[Part]:
    [commit] = _git("rev-parse", "HEAD")
    files = _git("grep", "-l", "mark.slow", ":(glob)tests/**/test_*.py")
    folders = {str(PurePosixPath(file).parent) for file in files}
    changed = {tests_of(path, folders) for path in _git("log", "-10", "--name-only", "--format=")}
    touched = [file for file in files if str(PurePosixPath(file).parent) in changed]
    others = [file for file in files if file not in touched]
    drawn = random.Random(commit).sample(others, -(-len(others) // 10))  # noqa: S311 - others for each commit
    slow = ("scripts/test", "-m", "slow", "-n", "2", "--dist", "worksteal")
    results = f"{tempfile.gettempdir()}/smpkit-dry-run-{commit}-{os.getpid()}"
    everything = [
        Part("documentation", ["scripts/site"]),  # first, since it also installs what the tests need
        Part("lint and default suite", ["scripts/test"], BUT_THESE, must_end=True),
        # PYTHON may name what the environment was made with; the run needs the environment itself.
        Part("dry run of scripts/gpu", ["env", "-u", "PYTHON", "scripts/gpu", "--dry-run", "--out", results]),
        Part("SageMaker SDK v2", ["scripts/test-sdk", "sdk2"]),
        Part("SageMaker SDK v3", ["scripts/test-sdk", "sdk3"]),
        Part("containers, Slurm, browser", ["scripts/test", "-m", "", *APART]),
        Part("struck jobs", [*slow, "tests/chaos", "-k", "kill or flipped"]),
        Part("slow tests of the folders that the last ten commits touched", [*slow, *touched], BUT_THESE),
        Part("slow tests of a tenth of the other files", [*slow, *drawn], BUT_THESE),
    ]
    return [part for part in everything if part.command != [*slow]]  # without a file these would be all


def main() -> int:
    began = time.monotonic()
    everything = parts()
    for part in everything:
        if time.monotonic() < began + SECONDS - TO_END:
            print(f"\n===== {part.name} =====", flush=True)
            part.run(began + SECONDS - TO_END)
    print("\n===== what became of each part =====")
    for part in everything:
        part.print()
    ended = sum((part.ended for part in everything), Counter[str]())
    failed = any(part.outcome == "failed" or (part.must_end and part.outcome == "not reached") for part in everything)
    print(
        f"===== {'a part failed: ' * failed}{_sum(ended) or 'no tests ran'} in {time.monotonic() - began:.2f}s =====",
        flush=True,
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
