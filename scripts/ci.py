"""What CI runs: within an hour all tests that this machine can run, each kind in a part of its own.

A part that fails fails the run, and the others follow. Slow tests get the time that is left. At the end, a line for
each part says whether it passed, why it was skipped, and which tests were not reached.

It needs nothing but Python: what the parts run makes their environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
SECONDS: Final = 60 * float(os.environ.get("SMPKIT_CI_MINUTES", "60"))
TO_END: Final = 60
"""How many of these seconds a part may take to end when the time is over."""
NO_TESTS: Final = 5
"""How pytest exits if all are deselected."""

# What has a part of its own.
SLURM: Final = (
    "tests/slurm/test_slurm.py",
    "tests/slurm/test_example.py::test_a_cluster_runs_it_and_it_goes_on_after_a_stop",
)
CONTAINERS: Final = ("tests/docker",)
BROWSER: Final = ("tests/observe/report/test_browser.py", "tests/docs/test_site_in_browser.py")


@dataclass
class Part:
    """One command, and what became of it."""

    name: str
    command: Sequence[str]
    options: Sequence[str] | None = ()
    """Options of pytest; None if the command does not run it."""
    must_end: bool = False
    """Whether the run fails if there is no time for all of it."""
    left: Sequence[str] = ()
    """What was not reached: tests, or files until it begins."""
    outcome: str = "not reached"
    ended: Counter[str] = field(default_factory=Counter)
    """How many tests passed, failed, ..."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Why tests were skipped, and how many each time."""

    def run(self, until: float) -> None:
        """Run it, until it ends or `time.monotonic()` is at that."""
        with tempfile.TemporaryDirectory(prefix="smpkit-ci-") as folder:
            file = Path(folder) / "record.json"
            command, environ = self.command, {**os.environ, "CI": "1"}
            if self.options is not None:
                options = ["-p", "scripts.ci_record", "--record", str(file), *self.options]
                if command == DEFAULT_SUITE:
                    environ["SMPKIT_TEST_OPTIONS"] = " ".join(options)
                else:
                    command = [*command, *options]
            status = _status(command, environ, until)
            record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self.ended, self.reasons = Counter(record.get("ended")), record.get("reasons", {})
        self.left = record.get("left", self.left)
        self.outcome = self._outcome(status)

    def _outcome(self, status: int | None) -> str:
        if self.ended["failed"] or self.ended["error"] or status not in (0, NO_TESTS, None):
            return "failed"
        if status is None:
            return "failed" if self.must_end else "cut short"
        return "skipped" if self.ended["skipped"] and not self.ended["passed"] else "passed"

    def lines(self) -> list[str]:
        """Return what there is to say at the end."""
        said = [_sum(self.ended)] * bool(self.ended) + [f"{len(self.left)} not reached"] * bool(self.left)
        return [
            f"{self.outcome:12} {self.name}{': ' * bool(said)}{', '.join(said)}",
            *(f"    skipped {number}: {reason}" for reason, number in self.reasons.items()),
            *(f"    not reached: {each}" for each in self.left),
        ]


DEFAULT_SUITE: Final = ("scripts/test",)


def _status(command: Sequence[str], environ: Mapping[str, str], until: float) -> int | None:
    """Return the exit status of a command; None if it was interrupted because the time is over."""
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


def slow_files(changed: Sequence[str], files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part files with slow tests into those of the folders that belong to what was changed, and the others.

    To smpkit/torch/offload/engine.py belongs tests/torch/offload, or where that has no slow tests, tests/torch.
    """
    folders = {str(PurePosixPath(file).parent) for file in files}
    touched = set[str]()
    for path in changed:
        whole = PurePosixPath(path.replace("smpkit_", ""))
        inside = PurePosixPath("tests", *whole.parts[1:])
        near = [str(folder) for folder in (*inside.parents, *("tests" / whole).parents) if str(folder) in folders]
        touched.update(near[:1])
    near, far = list[str](), list[str]()
    for file in files:
        (near if str(PurePosixPath(file).parent) in touched else far).append(file)
    return near, far


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def parts() -> list[Part]:
    [commit] = _git("rev-parse", "HEAD")
    files = _git("grep", "-l", "mark.slow", ":(glob)tests/**/test_*.py")
    random.Random(commit).shuffle(files)  # noqa: S311 - time runs out for other files each time
    touched, others = slow_files(_git("log", "-10", "--name-only", "--format="), files)
    whole = ("scripts/test", "-m", "")
    slow = ("scripts/test", "-m", "slow", "-n", "2", "--dist", "worksteal")
    but_own = [f"--deselect={path}" for path in (*SLURM, *CONTAINERS, *BROWSER)]
    results = f"{tempfile.gettempdir()}/smpkit-dry-run-{commit}-{os.getpid()}"
    everything = [
        Part("documentation", ["scripts/site"], None),  # first, since it also installs what the tests need
        Part("lint and default suite", DEFAULT_SUITE, but_own, must_end=True),
        Part("dry run of scripts/gpu", ["scripts/gpu", "--dry-run", "--out", results], None),
        Part("SageMaker SDK v2", ["scripts/test-sdk", "sdk2"]),
        Part("SageMaker SDK v3", ["scripts/test-sdk", "sdk3"]),
        Part("containers", [*whole, *CONTAINERS]),
        Part("Slurm", [*whole, *SLURM]),
        Part("browser", [*whole, *BROWSER]),
        Part("struck jobs", [*slow, "tests/chaos", "-k", "kill or flipped"]),
    ]
    if touched:
        name = "slow tests of the folders that the last ten commits touched"
        everything.append(Part(name, [*slow, *touched], but_own, left=touched))
    if others:
        name = "a tenth of the other slow tests"
        everything.append(Part(name, [*slow, *others], [*but_own, "--tenth", commit], left=others))
    return everything


def main() -> int:
    began = time.monotonic()
    everything = parts()
    for part in everything:
        if time.monotonic() < began + SECONDS - TO_END:
            print(f"\n===== {part.name} =====", flush=True)
            part.run(began + SECONDS - TO_END)
    print("\n===== what became of each part =====")
    for part in everything:
        print(*part.lines(), sep="\n")
    ended = sum((part.ended for part in everything), Counter[str]())
    failed = any(part.outcome == "failed" or (part.must_end and part.outcome == "not reached") for part in everything)
    print(
        f"===== {'a part failed: ' * failed}{_sum(ended) or 'no tests ran'} in {time.monotonic() - began:.2f}s =====",
        flush=True,
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
