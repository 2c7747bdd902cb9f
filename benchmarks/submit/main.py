"""Time a dry run and the packing of 10,000 files beside SageMaker's SDK v2, the two taking turns; print a table.

Run it with the Python of an environment that has both smpkit and SDK v2 (`scripts/test-sdk sdk2` makes one).
`--startup` times `smpkit --help` against the import of click, and the first line of a job's ranks against torchrun and
mpirun, instead; it needs torch in place of the SDK.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMITS = {"request": 3.0, "pack": 2.0}
"""We must be so many times as fast as the SDK."""
STARTUP_LIMIT = 2.5
"""`smpkit --help` may take this many times as long as `python -c "import click"`."""
MPI_SECONDS = 0.7
"""So much later than under mpirun alone a rank may begin."""

WORKER = Path(__file__).with_name("worker.py")

JOB = """\
entry_point: train.py
image: 123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest
role: arn:aws:iam::123456789012:role/SM
output: s3://bucket/out
compute: {instance_type: ml.p4d.24xlarge, instance_count: 2}
distribution:
  smdistributed: {modelparallel: {enabled: true, parameters: {partitions: 2, microbatches: 4, ddp: true}}}
  mpi: {enabled: true, processes_per_host: 8}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--files", type=int, default=10_000, help="files to pack (default: %(default)s)")
    parser.add_argument("--startup", action="store_true", help="time `smpkit --help` instead")
    options = parser.parse_args(arguments)
    if options.startup:
        return startup(options.runs)
    with folders(options.files) as (small, large):
        pairs = [(task, who) for task in ("request", "pack") for who in ("sdk2", "smpkit")]
        found: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
        for run in range(options.runs + 1):
            for task, who in pairs:
                measured = measure(task, who, small if task == "request" else large)
                if run:  # the first ones fill the disk cache
                    found[task, who].append(measured)
    print(table(found, options.files))
    return 0 if all(ratio(found, task) >= limit for task, limit in LIMITS.items()) else 1


def startup(runs: int) -> int:
    """Time the help page, which should come at once, and the first line of a rank; print tables."""
    beside = Path(sys.executable).parent
    script = shutil.which("smpkit", path=str(beside))
    if script is None:
        sys.exit("error: no `smpkit` beside this Python\nhint: install it first, as with `pip install -e .`")
    pages = {
        '`python -c "pass"`': [sys.executable, "-c", "print()"],
        '`python -c "import click"`': [sys.executable, "-c", "import click; print()"],
        "`smpkit --help`": [script, "--help"],
    }
    _, click, page = first_lines(pages, runs)
    ranks = {"`torchrun`": [str(beside / "torchrun"), "--nproc-per-node", "2", "rank.py"]}
    ranks["`smpkit run`"] = [script, "run", "rank.py", "--ranks", "2"]
    if mpirun := shutil.which("mpirun"):
        ranks["`mpirun`"] = [mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "rank.py"]
        ranks["`smpkit run`, over MPI"] = [
            script,
            "run",
            "rank.py",
            "--ranks",
            "2",
            "--set",
            "distribution.mpi.enabled=true",
        ]
    with tempfile.TemporaryDirectory(prefix="smpkit-benchmark-") as folder:
        Path(folder, "rank.py").write_text("import torch\nprint('a line', flush=True)\n")
        torchrun, ours, *mpi = first_lines(ranks, max(3, runs // 4), folder, b"a line")
    seconds = {
        "help page over click": (page / click, STARTUP_LIMIT),
        "first line over torchrun": (ours / torchrun, 1.0),
    }
    if mpi:
        seconds["seconds after mpirun"] = (mpi[1] - mpi[0], MPI_SECONDS)
    for name, (value, limit) in seconds.items():
        print(f"{name}: **{value:.2f}** (limit {limit})")
    return 0 if all(value <= limit for value, limit in seconds.values()) else 1


def first_lines(
    commands: dict[str, list[str]], runs: int, folder: str | None = None, text: bytes = b"\n"
) -> list[float]:
    """Let commands take turns, print best and median of the time until `text` comes, and return the medians."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for run in range(runs + 2):
        for name, command in commands.items():
            start = time.perf_counter()
            with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                assert process.stdout is not None
                next(line for line in process.stdout if text in line)
                if run >= 2:  # the first ones fill the disk cache
                    seconds[name].append(time.perf_counter() - start)
                process.stdout.read()
    for name, times in seconds.items():
        print(f"| {name} | {min(times) * 1000:.0f} ms | {statistics.median(times) * 1000:.0f} ms |")
    return [statistics.median(times) for times in seconds.values()]


@contextmanager
def folders(files: int) -> Iterator[tuple[Path, Path]]:
    """Make a folder with a job, and one with so many beginnings of real Python files."""
    with tempfile.TemporaryDirectory(prefix="smpkit-benchmark-") as name:
        small, large = Path(name, "small"), Path(name, "large")
        for folder in (small, large):
            folder.mkdir()
            (folder / "train.py").write_text("print()\n")
            (folder / "job.yaml").write_text(JOB)
        sources = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
        random.Random(0).shuffle(sources)
        for number in range(files - 2):
            target = large / f"package_{number // 100}" / f"module_{number}.py"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(sources[number % len(sources)].read_bytes()[:8000])
        yield small, large


def measure(task: str, who: str, folder: Path) -> dict[str, Any]:
    """Let a fresh process do one task, and return what it says of itself."""
    environ = {
        **os.environ,
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
    }
    command = [sys.executable, "-W", "ignore", str(WORKER), task, who]
    done = subprocess.run(
        command, cwd=folder, env=environ, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def median(measured: list[dict[str, Any]], key: str) -> float:
    return statistics.median(item[key] for item in measured)


def ratio(found: dict[tuple[str, str], list[dict[str, Any]]], task: str) -> float:
    return median(found[task, "sdk2"], "cpu") / median(found[task, "smpkit"], "cpu")


def table(found: dict[tuple[str, str], list[dict[str, Any]]], files: int) -> str:
    titles = {"request": "from nothing to the request", "pack": f"packing {files:,} files"}
    lines = ["| task | | CPU | wall | peak memory | bytes |", "|---|---|---|---|---|---|"]
    for (task, who), runs in found.items():
        numbers = f"{median(runs, 'cpu'):.2f} s | {median(runs, 'wall'):.2f} s | {median(runs, 'peak') / 1024:.0f} MiB"
        lines.append(f"| {titles[task]} | {who} | {numbers} | {median(runs, 'bytes'):,.0f} |")
    ratios = ", ".join(
        f"{titles[task]} {ratio(found, task):.1f} times (limit {limit:g})" for task, limit in LIMITS.items()
    )
    return "\n".join([*lines, "", f"As fast as the SDK, by medians of CPU time: **{ratios}**."])


if __name__ == "__main__":
    sys.exit(main())
