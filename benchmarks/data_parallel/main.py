"""Train with smpkit's data parallelism and with torch's in turns on the same model; write the table of README.md."""

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

HERE = Path(__file__).parent
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ON_RANKS: Mapping[int, Sequence[str]] = {
    1: ["one process"],
    2: ["data parallelism", "sharded optimizer state", "sharded data parallelism"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model only; the README stays as it is")
    parser.add_argument("--dry", action="store_true", help="the README stays as it is")
    parser.add_argument("--repetitions", type=int, default=200, help="counted steps of each (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", default=["small", "medium", "large"], help="models (default: all)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repetitions, options.sizes = 3, ["small"]
    found = [run(ranks, features, options) for ranks, features in ON_RANKS.items()]
    cells = [cell for each in found for cell in each["cells"]]
    text = table(cells) + "\n\n" + environment(options, found[-1])
    print(text)
    if not (options.quick or options.dry):
        readme = HERE / "README.md"
        before, _, rest = readme.read_text().partition(BEGIN)
        readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


def run(ranks: int, features: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Start ranks of worker.py and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--module", "benchmarks.data_parallel.worker", f"--out={out}"]
        command += [f"--repetitions={options.repetitions}", "--sizes", *options.sizes, "--features", *features]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=variables, cwd=HERE.parent.parent, timeout=900)
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per cell: times and their ratio, and the ratio of processor times."""
    lines = [
        "| feature | model | peer | peer's step | smpkit's step | ratio of medians (fastest) | of processor time |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        peer = cell["peer"]
        theirs, ours = (cell["seconds"][name] for name in (peer, "smpkit"))
        ratio = f"{ratio_of(statistics.median, ours, theirs):.3f} ({ratio_of(min, ours, theirs):.3f})"
        processor = ratio_of(statistics.median, cell["cpu"]["smpkit"], cell["cpu"][peer])
        both = " | ".join(f"{statistics.median(times) * 1e3:.1f} ms" for times in (theirs, ours))
        lines.append(f"| {cell['feature']} | {cell['size']} | {peer} | {both} | {ratio} | {processor:.3f} |")
    return "\n".join(lines)


def ratio_of(figure: Any, ours: Sequence[float], theirs: Sequence[float]) -> float:
    return float(figure(ours) / figure(theirs))


def environment(options: argparse.Namespace, found: Mapping[str, Any]) -> str:
    return (
        f"{options.repetitions} steps each, on {os.cpu_count()} cores ({platform.machine()}), with a load average of"
        f" {found['load']:.1f} over five minutes; {platform.system()}, Python {platform.python_version()}, torch"
        f" {found['torch']}, gloo over the loopback interface."
    )


if __name__ == "__main__":
    sys.exit(main())
