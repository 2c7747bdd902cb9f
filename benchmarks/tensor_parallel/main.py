"""Run smpkit's tensor parallelism and torch's DTensor in turns on the same blocks; write the table of README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small width only; the README stays as it is")
    parser.add_argument("--dry", action="store_true", help="the README stays as it is")
    parser.add_argument("--repetitions", type=int, default=30, help="counted steps of each (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (default: %(default)s)")
    options = parser.parse_args(arguments)
    widths = [64] if options.quick else [512, 2048] if torch.cuda.is_available() else [64, 512]
    found = run(options.ranks, 3 if options.quick else options.repetitions, widths)
    text = table(found["cells"]) + "\n\n" + environment(options, found)
    print(text)
    if not (options.quick or options.dry):
        readme = HERE / "README.md"
        before, _, rest = readme.read_text().partition(BEGIN)
        readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


def run(ranks: int, repetitions: int, widths: Sequence[int]) -> dict[str, Any]:
    """Start ranks of worker.py and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--module", "benchmarks.tensor_parallel.worker", f"--out={out}", f"--repetitions={repetitions}"]
        command += [f"--widths={json.dumps(list(widths))}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=variables, cwd=HERE.parent.parent, timeout=900)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per cell: times, their ratio, messages and bytes."""
    lines = [
        "| block | width | boundary | smpkit | DTensor | ratio of medians (fastest) | messages | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        ours, theirs = (cell["times"][name] for name in ("smpkit", "DTensor"))
        medians = statistics.median(ours) / statistics.median(theirs)
        sent = " / ".join(str(sum(cell["messages"][name].values())) for name in ("smpkit", "DTensor"))
        size = " / ".join(f"{cell['bytes'][name] / 2**20:.2f}" for name in ("smpkit", "DTensor"))
        both = " | ".join(f"{statistics.median(times) * 1e3:.2f} ms" for times in (ours, theirs))
        ratio = f"{medians:.2f} ({min(ours) / min(theirs):.2f})"
        lines.append(f"| {cell['kind']} | {cell['width']} | {cell['boundary']} | {both} | {ratio} | {sent} | {size} |")
    return "\n".join(lines)


def environment(options: argparse.Namespace, found: Mapping[str, Any]) -> str:
    python = f"{platform.system()}, Python {platform.python_version()}"
    machine = f"{os.cpu_count()} cores ({platform.machine()}), {found['device']}"
    return (
        f"Medians of {options.repetitions} steps each, on {machine}, with a load"
        f" average of {found['load']:.1f} over five minutes; {python}, torch"
        f" {found['torch']}, gloo over the loopback interface."
    )


if __name__ == "__main__":
    sys.exit(main())
