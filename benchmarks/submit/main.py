"""Time a dry run and the packing of 10,000 files beside SageMaker's SDK v2, the two taking turns.

Run it with the Python of an environment that has both smpkit and SDK v2 (`scripts/test-sdk sdk2` makes one).
The part `startup` times `smpkit --help` against the import of click, and the first line of a job's ranks against
torchrun and mpirun; it needs torch in place of the SDK.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import milliseconds, parser, run, table, take_turns

LIMITS = {"request": 3.0, "pack": 2.0}
"""We must be so many times as fast as the SDK."""

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


def main() -> None:
    options = parser(__doc__, repetitions=5)
    options.add_argument("--files", type=int, default=10_000, help="files to pack (default: %(default)s)")
    run(__file__, options, {"sdk": beside_the_sdk, "startup": startup}, ["sdk"], "Medians of {repetitions} turns, ")


def beside_the_sdk(options: argparse.Namespace) -> tuple[str, object]:
    """Time the request and the packing."""
    count = 100 if options.quick else options.files
    titles = {"request": "from nothing to the request", "pack": f"packing {count:,} files"}
    rows, told = [], []
    with folders(count) as sources:
        for task, title in titles.items():
            workers = {who: partial(measure, task, who, sources[task]) for who in ("sdk2", "smpkit")}
            turns = take_turns(workers, options.repetitions)  # the first of all fills the disk cache
            medians = {}
            for who, measured in turns.items():
                medians[who] = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
                cpu, wall, peak, size = (medians[who][key] for key in ("cpu", "wall", "peak", "bytes"))
                rows.append([title, who, f"{cpu:.2f} s", f"{wall:.2f} s", f"{peak / 1024:.0f} MiB", f"{size:,.0f}"])
            ratio = medians["sdk2"]["cpu"] / medians["smpkit"]["cpu"]
            told.append(f"{title} {ratio:.1f} times (limit {LIMITS[task]:g})")
    text = table(["task", "", "CPU", "wall", "peak memory", "bytes"], rows)
    return f"{text}\n\nAs fast as the SDK, by medians of CPU time: **{', '.join(told)}**.", rows


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


def startup(options: argparse.Namespace) -> tuple[str, object]:
    """Time the help page, which should come at once, and the first line of a rank."""
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
        seconds: dict[str, list[float]] = {}
        for commands, text, turns in (pages, b"\n", options.repetitions), (ranks, b"a line", options.repetitions // 4):
            waits = {name: partial(first_line, command, folder, text) for name, command in commands.items()}
            seconds |= take_turns(waits, max(1, turns), warm_ups=2)  # which fill the disk cache
    rows = [[name, milliseconds([min(times)]), milliseconds(times)] for name, times in seconds.items()]
    _, click, page, torchrun, job, *mpi = map(statistics.median, seconds.values())
    told = f"`--help` takes {page / click:.2f} times as long as click (limit 2.5), a first line"
    told += f" {job / torchrun:.2f} times as long as torchrun's (limit 1)"
    if mpi:
        told += f", and {mpi[1] - mpi[0]:.2f} s longer than mpirun's (limit 0.7 s)"
    return f"{table(['command', 'best', 'median'], rows)}\n\n{told}.", seconds


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
    main()
