"""OffloadModel beside FairScale, its optimizer beside torch's and DeepSpeed's; steps in virtual time; large models."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import mebibytes, parser, report, table
from benchmarks.offload_model import simulated, sizes
from benchmarks.offload_model.optimizers import optimizer_table

LIBRARIES = ("fairscale", "smpkit", "smpkit fast", "plain")
FAIRSCALE_WIDTH = 2048


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--only", choices=["optimizer", "words", "simulated", "sizes"], help="run one part")
    options.add_argument("--fairscale-python", default=sys.executable, help="a Python that has fairscale 0.4.13")
    options.add_argument("--width", type=int, help="of FairScale's model; 2048 on a GPU, 512 without one")
    options.add_argument("--rounds", type=int, default=3, help="how often the libraries take turns at words")
    options.add_argument("--steps", type=int, default=5, help="that are timed, behind two that warm up")
    options.add_argument("--models", nargs="+", choices=[*sizes.SIZES], default=[*sizes.SIZES], help="of sizes")
    options.add_argument("--tokens", type=int, nargs="+", default=sizes.TOKENS, help="of a step of sizes")
    chosen = options.parse_args(arguments)
    quick, on_gpu = chosen.quick, torch.cuda.is_available()
    wanted = [chosen.only] if chosen.only else ["optimizer", "words", "sizes" if on_gpu else "simulated"]
    if "optimizer" in wanted:
        report(__file__, "optimizer", optimizer_table(1 << 20 if quick else 32 << 20), chosen)
    if "words" in wanted:
        width = chosen.width or (128 if quick else FAIRSCALE_WIDTH if on_gpu else 512)
        rounds, steps = (1, 1) if quick else (chosen.rounds, chosen.steps)
        text = words_table(width, rounds, steps, chosen.fairscale_python)
        report(__file__, "words" if width != FAIRSCALE_WIDTH else "words of its own width", text, chosen)
    if "sizes" in wanted:
        models = sizes.TINY if quick else {name: sizes.SIZES[name] for name in chosen.models}
        rows = sizes.rows(models, [1024] if quick else chosen.tokens)
        report(__file__, "sizes", table(sizes.HEADS, rows), chosen)
    if "simulated" in wanted:  # not beside a GPU: a simulated accelerator would take the place of the real one
        virtual = list(simulated.rows())
        text = (
            f"Eight slices, one microbatch; peaks in units of a slice's weights.\n\n{table(simulated.HEADS, virtual)}"
        )
        report(__file__, "simulated", text, chosen, virtual)
    return 0


def words_table(width: int, rounds: int, steps: int, fairscale_python: str) -> str:
    """Let the libraries take turns, in processes of their own."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LIBRARIES}
    worker = Path(__file__).with_name("worker.py")
    for _ in range(rounds):
        for name, runs in found.items():
            python = fairscale_python if name == "fairscale" else sys.executable
            command = [python, "-W", "ignore", str(worker), name, f"--width={width}", f"--steps={steps}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                print(f"{name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
            else:
                runs.append(json.loads(done.stdout.splitlines()[-1]))
                print(f"{name}: {runs[-1]['words_per_second']:.1f} words/s", flush=True)
    heads = ["", "words/s, best", "median", "CPU s/step", "peak host", "peak device", "reserved", "loss after 1 step"]
    rows = []
    for name, runs in found.items():
        if runs:
            speeds = [run["words_per_second"] for run in runs]
            kinds = ("host_bytes", "device_bytes", "reserved_bytes")
            memory = [mebibytes(min((run[key] for run in runs if key in run), default=None)) for key in kinds]
            losses = runs[0]["losses"]
            busy = min(run["busy_seconds"] for run in runs)
            cells = [f"{max(speeds):.1f}", f"{statistics.median(speeds):.1f}", f"{busy:.3f}", *memory]
            rows.append([name, *cells, f"{losses[1]:.5f}", f"{losses[steps]:.5f}"])
    about = f"Width {width}, 10 layers, 3 slices, 1 microbatch, fp32, Adam; {steps} steps, {rounds} times."
    return f"{about}\n\n{table([*heads, f'after {steps}'], rows)}"


if __name__ == "__main__":
    sys.exit(main())
