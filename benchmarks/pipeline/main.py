"""Run smpkit's pipeline and torch.distributed.pipelining in turns on the same models; write the tables of README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.pipeline.models import BACKWARD_SECONDS, FORWARD_SECONDS

HERE = Path(__file__).parent
SMALL, LARGE = 16 * 1024, 8 * 1024 * 1024
"""Bytes of a message between stages."""

Cell = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small cell of each kind; the README stays as it is")
    parser.add_argument("--dry", action="store_true", help="the README stays as it is")
    parser.add_argument("--only", choices=["gpt", "sleep", "schedules"], help="run one of the parts")
    parser.add_argument("--sizes", type=int, nargs="+", help="of the sleeping stages, only cells of so many ranks")
    parser.add_argument("--counts", type=int, nargs="+", help="and of so many microbatches")
    parser.add_argument("--messages", choices=["small", "large"], help="and with messages of this size")
    parser.add_argument("--repetitions", type=int, default=5, help="counted steps of each (default: %(default)s)")
    options = parser.parse_args(arguments)
    repetitions = 2 if options.quick else options.repetitions
    save = not (options.quick or options.dry)
    if options.only in (None, "gpt"):
        report("gpt", gpt_table(run(2, repetitions, None, *["--quick"] * options.quick)[0]), repetitions, save=save)
    if options.only in (None, "sleep"):
        chosen = options.sizes or options.counts or options.messages
        sizes, counts = ([2], [8]) if options.quick else (options.sizes or [2, 4, 8], options.counts or [8, 16, 32])
        messages = {"small": [SMALL], "large": [LARGE]}.get(options.messages, [SMALL, LARGE])
        cells = [[count, num_bytes // 4] for num_bytes in messages for count in counts]
        found = [cell for size in sizes for cell in run(size, repetitions, cells)]
        report("sleep", sleep_table(found), repetitions, save=save and not chosen)
    if options.only in (None, "schedules"):
        sizes, counts = ([2], [4]) if options.quick else ([2, 4], [8, 16])
        cells = [[count, SMALL // 4] for count in counts]
        found = [cell for size in sizes for cell in run(size, repetitions, cells, "--schedules")]
        report("schedules", schedules_table(found), repetitions, save=save)
    return 0


def run(size: int, repetitions: int, cells: list[list[int]] | None = None, *more: str) -> list[Cell]:
    """Start `size` ranks of worker.py and return what rank 0 wrote; without cells they run the GPT."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += ["--module", "benchmarks.pipeline.worker", f"--out={out}", f"--repetitions={repetitions}"]
        command += [*([f"--cells={json.dumps(cells)}"] if cells else []), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, cwd=HERE.parent.parent, timeout=1800)
        found: list[Cell] = json.loads(out.read_text())
    return found


def sleep_table(cells: Sequence[Cell]) -> str:
    """Return a row per cell: percent of the ideal, from the fastest and from the median step."""
    lines = [
        "| P | M | message | torch 1F1B | smpkit | smpkit / torch | live microbatches per rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        slots = cell["microbatches"] + cell["size"] - 1
        ideal_seconds = slots * (FORWARD_SECONDS + BACKWARD_SECONDS)
        times = [cell["times"][name]["seconds"] for name in ("torch 1F1B", "smpkit")]
        shares = [f"{ideal_seconds / min(each):.1%} ({ideal_seconds / statistics.median(each):.1%})" for each in times]
        ratios = [reduce(times[1]) / reduce(times[0]) for reduce in (min, statistics.median)]
        message = (
            f"{cell['num_bytes'] // 1024} KiB" if cell["num_bytes"] < 1 << 20 else f"{cell['num_bytes'] >> 20} MiB"
        )
        live = " ".join(map(str, cell["live"]))
        lines.append(
            f"| {cell['size']} | {cell['microbatches']} | {message} | {' | '.join(shares)} "
            f"| {ratios[0]:.3f} ({ratios[1]:.3f}) | {live} |"
        )
    return "\n".join(lines)


def schedules_table(cells: Sequence[Cell]) -> str:
    """Return a row per contestant: percent of a step in which a rank computes, from the fastest and the median step."""
    heads = [f"P = {cell['size']}, M = {cell['microbatches']}" for cell in cells]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(cells) + 1) + "|"]
    for name in cells[0]["times"]:
        shares = []
        for cell in cells:
            work_seconds = cell["microbatches"] * (FORWARD_SECONDS + BACKWARD_SECONDS)
            seconds = cell["times"][name]["seconds"]
            shares.append(f"{work_seconds / min(seconds):.1%} ({work_seconds / statistics.median(seconds):.1%})")
        lines.append(f"| {name} | {' | '.join(shares)} |")
    return "\n".join(lines)


def gpt_table(cell: Cell) -> str:
    """Return a row per contestant: seconds of a step, and the loss of the first and last step."""
    lines = ["| | fastest step | median step | first loss | last loss |", "|---|---|---|---|---|"]
    lines += [f"| {name} | not run: {why} | | | |" for name, why in cell.get("absent", {}).items()]
    for name, times in cell["times"].items():
        seconds, losses = times["seconds"], times["losses"]
        lines.append(
            f"| {name} | {min(seconds):.3f} s | {statistics.median(seconds):.3f} s "
            f"| {losses[0]:.7f} | {losses[-1]:.7f} |"
        )
    return "\n".join(lines)


def report(part: str, table: str, repetitions: int, *, save: bool) -> None:
    """Print a table; save: write it into the README, between the marks of its part."""
    text = f"{table}\n\n{environment(repetitions)}\n"
    print(text, flush=True)
    if save:
        readme, begin, end = HERE / "README.md", f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->\n"
        before, rest = readme.read_text().split(begin)
        readme.write_text(before + begin + text + end + rest.split(end)[1])


def _device() -> str:
    return f"one {torch.cuda.get_device_name()} that all ranks share, " if torch.cuda.is_available() else ""


def environment(repetitions: int) -> str:
    return (
        f"{repetitions} counted steps of each contestant, on {_device()}{os.cpu_count()} cores ({platform.machine()}) "
        f"with a load average of {os.getloadavg()[1]:.1f} over five minutes; {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, gloo over the loopback interface."
    )


if __name__ == "__main__":
    sys.exit(main())
