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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import milliseconds, table, take_turns

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
    return startup(options.runs) if options.startup else beside_the_sdk(options.runs, options.files)


def beside_the_sdk(runs: int, files: int) -> int:
    """Time the request and the packing; print a table, and whether the limits hold."""
    titles = {"request": "from nothing to the request", "pack": f"packing {files:,} files"}
    rows, ratios = [], {}
    with folders(files) as sources:
        for task, title in titles.items():
            workers = {who: partial(measure, task, who, sources[task]) for who in ("sdk2", "smpkit")}
            medians = {}
            for who, measured in take_turns(workers, runs).items():  # the first turn fills the disk cache
                medians[who] = {key: statistics.median(each[key] for each in measured) for key in measured[0]}
                cpu, wall, peak, size = (medians[who][key] for key in ("cpu", "wall", "peak", "bytes"))
                rows.append([title, who, f"{cpu:.2f} s", f"{wall:.2f} s", f"{peak / 1024:.0f} MiB", f"{size:,.0f}"])
            ratios[task] = medians["sdk2"]["cpu"] / medians["smpkit"]["cpu"]
    print(table(["task", "", "CPU", "wall", "peak memory", "bytes"], rows))
    told = [f"{titles[task]} {ratios[task]:.1f} times (limit {limit:g})" for task, limit in LIMITS.items()]
    print(f"\nAs fast as the SDK, by medians of CPU time: **{', '.join(told)}**.")
    return 0 if all(ratios[task] >= limit for task, limit in LIMITS.items()) else 1


@contextmanager
def folders(files: int) -> Iterator[Mapping[str, Path]]:
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
        yield {"request": small, "pack": large}


def measure(task: str, who: str, folder: Path) -> dict[str, float]:
    """Let a fresh process do one task, and return what it says of itself."""
    account = {"AWS_DEFAULT_REGION": "us-west-2", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    environ = {**os.environ, **account, "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    command = [sys.executable, "-W", "ignore", str(WORKER), task, who]
    done = subprocess.run(
        command, cwd=folder, env=environ, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


# --- from a command to its first line ---------------------------------------------------------------------------------


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
    ours = [script, "run", "rank.py", "--ranks", "2"]
    ranks = {"`torchrun`": [str(beside / "torchrun"), "--nproc-per-node", "2", "rank.py"], "`smpkit run`": ours}
    if mpirun := shutil.which("mpirun"):
        ranks["`mpirun`"] = [mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "rank.py"]
        ranks["`smpkit run`, over MPI"] = [*ours, "--set", "distribution.mpi.enabled=true"]
    with tempfile.TemporaryDirectory(prefix="smpkit-benchmark-") as folder:
        Path(folder, "rank.py").write_text("import torch\nprint('a line', flush=True)\n")
        _, click, page = first_lines(pages, runs, folder, b"\n")
        torchrun, run, *mpi = first_lines(ranks, max(3, runs // 4), folder, b"a line")
    found = {"help page over click": (page / click, STARTUP_LIMIT), "first line over torchrun": (run / torchrun, 1.0)}
    if mpi:
        found["seconds after mpirun"] = (mpi[1] - mpi[0], MPI_SECONDS)
    for name, (value, limit) in found.items():
        print(f"{name}: **{value:.2f}** (limit {limit})")
    return 0 if all(value <= limit for value, limit in found.values()) else 1


def first_lines(commands: Mapping[str, list[str]], runs: int, folder: str, text: bytes) -> list[float]:
    """Let commands take turns, print best and median of the time until `text` comes, and return the medians."""
    waits = {name: partial(first_line, command, folder, text) for name, command in commands.items()}
    seconds = take_turns(waits, runs, warm_ups=2)  # which fill the disk cache
    rows = [[name, milliseconds([min(times)]), milliseconds(times)] for name, times in seconds.items()]
    print(table(["command", "best", "median"], rows))
    return [statistics.median(times) for times in seconds.values()]


def first_line(command: list[str], folder: str, text: bytes) -> float:
    """Return the seconds until a command prints a line with `text`, and let it end."""
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if text in line)
        seconds = time.perf_counter() - start
        process.stdout.read()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
