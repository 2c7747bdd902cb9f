"""Time `smpkit --help` against the import of click alone, the two taking turns, and print a Markdown table."""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

LIMIT = 2.5
"""`smpkit --help` may take this many times as long as `python -c "import click"`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40, help="runs of each command (default: %(default)s)")
    runs = parser.parse_args(arguments).runs
    commands = {
        'python -c "pass"': [sys.executable, "-c", "pass"],
        'python -c "import click"': [sys.executable, "-c", "import click"],
        "smpkit --help": [find_smpkit(), "--help"],
    }
    seconds = measure(commands, runs)
    ratio = statistics.median(seconds["smpkit --help"]) / statistics.median(seconds['python -c "import click"'])
    print(table(seconds, ratio))
    return 0 if ratio <= LIMIT else 1


def find_smpkit() -> str:
    """The console script beside this Python, which is what users start."""
    found = shutil.which("smpkit", path=str(Path(sys.executable).parent))
    if found is None:
        sys.exit("error: no `smpkit` beside this Python\nhint: install it first, as with `pip install -e .`")
    return found


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, list[float]]:
    """Run the commands in turns, so that whatever else the machine does falls on all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for run in range(runs + 2):
        for name, command in commands.items():
            start = time.perf_counter()
            # Captured, so that the wait is for the end of a pipe: waiting for a process with a timeout only polls.
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            if run >= 2:  # the first ones fill the disk cache
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(seconds: dict[str, list[float]], ratio: float) -> str:
    lines = ["| command | best | median |", "|---|---|---|"]
    for name, times in seconds.items():
        lines.append(f"| `{name}` | {min(times) * 1000:.0f} ms | {statistics.median(times) * 1000:.0f} ms |")
    versions = f"Python {platform.python_version()}, click {metadata.version('click')}"
    lines += ["", f"Ratio of the medians: **{ratio:.2f}** (limit {LIMIT}). {versions}, {len(times)} runs each."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
