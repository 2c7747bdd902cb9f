"""OffloadModel beside FairScale, its optimizer beside torch's and DeepSpeed's; steps in virtual time; a large model."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import mebibytes, parser, run, table, take_turns
from benchmarks.offload_model import optimizers, simulated, sizes
from benchmarks.offload_model.worker import LIBRARIES, STEPS

FAIRSCALE_WIDTH = 2048


def main() -> None:
    options = parser(__doc__, repetitions=3)
    options.add_argument("--fairscale-python", default=sys.executable, help="a Python that has fairscale 0.4.13")
    options.add_argument("--width", type=int, help="of FairScale's model; 2048 on a GPU, 512 without one")
    parts = {"optimizer": optimizers.steps, "words": words, "simulated": simulated.steps, "sizes": sizes.steps}
    # A simulated accelerator would take the place of a GPU.
    run(__file__, options, parts, ["optimizer", "words", "sizes" if torch.cuda.is_available() else "simulated"])


def words(options: argparse.Namespace) -> tuple[str, object]:
    """Let the libraries take turns at FairScale's own benchmark, in processes of their own."""
    width = options.width or (128 if options.quick else FAIRSCALE_WIDTH if torch.cuda.is_available() else 512)
    pythons = {name: options.fairscale_python if name == "fairscale" else sys.executable for name in LIBRARIES}
    turns = {name: partial(trained, name, python, width) for name, python in pythons.items()}
    results = take_turns(turns, options.repetitions, warm_ups=0)
    rows = []
    for name, runs in results.items():
        if runs := [result for result in runs if result]:
            speeds = [run["words_per_second"] for run in runs]
            kinds = ("host_bytes", "device_bytes", "reserved_bytes")
            memory = [mebibytes(min((run[key] for run in runs if key in run), default=None)) for key in kinds]
            losses, busy = runs[0]["losses"], min(run["busy_seconds"] for run in runs)
            cells = [f"{max(speeds):.1f}", f"{statistics.median(speeds):.1f}", f"{busy:.3f}", *memory]
            rows.append([name, *cells, f"{losses[1]:.5f}", f"{losses[STEPS]:.5f}"])
    heads = ["", "words/s, best", "median", "CPU s/step", "peak host", "peak device", "reserved", "loss after 1 step"]
    about = f"Width {width}, 10 layers, 3 slices, 1 microbatch, fp32, Adam; {STEPS} steps, {options.repetitions} times."
    return f"{about}\n\n{table([*heads, f'after {STEPS}'], rows)}", results


def trained(name: str, python: str, width: int) -> dict[str, Any]:
    """Return what a library's training measured; nothing where it failed."""
    worker = str(Path(__file__).with_name("worker.py"))
    command = [python, "-W", "ignore", worker, name, str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        print(f"{name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
        return {}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {result['words_per_second']:.1f} words/s", flush=True)
    return result


if __name__ == "__main__":
    main()
