"""OffloadModel beside FairScale, its optimizer beside torch's and DeepSpeed's; steps in virtual time; large models."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, parser, report, table
from benchmarks.offload_model import deepspeed_adam, optimizers, sizes
from benchmarks.offload_model.simulated import simulated_rows

HERE = Path(__file__).parent
FAIRSCALE = ("fairscale", "smpkit", "smpkit fast")
FAIRSCALE_WIDTH = 2048
OPTIMIZER_SECONDS = 25.0  # per number of threads, so that this part ends within three minutes with what is compiled


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--only", choices=["optimizer", "words", "simulated", "sizes"], help="run one part")
    options.add_argument("--fairscale-python", default=sys.executable, help="a Python that has fairscale 0.4.13")
    options.add_argument("--build-seconds", type=float, default=60, help="the most that compiling DeepSpeed may take")
    options.add_argument("--width", type=int, help="of FairScale's model; 2048 on a GPU, 512 without one")
    options.add_argument("--rounds", type=int, default=3, help="how often the libraries take turns at words")
    options.add_argument("--steps", type=int, default=5, help="that are timed, behind two that warm up")
    options.add_argument("--models", nargs="+", choices=[*sizes.SIZES], default=[*sizes.SIZES], help="of sizes")
    options.add_argument("--tokens", type=int, nargs="+", default=sizes.TOKENS, help="of a step of sizes")
    chosen = options.parse_args(arguments)
    quick, on_gpu = chosen.quick, torch.cuda.is_available()
    wanted = [chosen.only] if chosen.only else ["optimizer", "words", "sizes" if on_gpu else "simulated"]

    def show(part: str, text: str, rows: object = None) -> None:
        report(Path(__file__).with_name("README.md"), part, f"{text}\n\n{machine()}", chosen, rows)

    if "optimizer" in wanted:
        show("optimizer", optimizer_table(1 << 20 if quick else 32 << 20, chosen.build_seconds, quick=quick))
    if "words" in wanted:
        width = chosen.width or (128 if quick else FAIRSCALE_WIDTH if on_gpu else 512)
        text = words_table(width, 1 if quick else chosen.rounds, chosen.steps, chosen.fairscale_python)
        show("words" if width != FAIRSCALE_WIDTH else "words of its own width", text)
    if "sizes" in wanted:
        models = sizes.TINY if quick else {name: sizes.SIZES[name] for name in chosen.models}
        show("sizes", sizes_table(models, [1024] if quick else chosen.tokens))
    if "simulated" in wanted:  # not beside a GPU: a simulated accelerator would take the place of the real one
        rows = simulated_rows()
        show("simulated", simulated_table(rows), rows)
    return 0


def optimizer_table(num_parameters: int, build_seconds: float, *, quick: bool) -> str:
    missing = deepspeed_adam.why_not(build_seconds)
    if missing is not None:
        print(f"DeepSpeedCPUAdam is left out: {missing}", flush=True)
    found, turns = [], []
    for count in (1, 2):
        print(f"AdamW in {count} threads ...", flush=True)
        times, number = optimizers.measure(
            num_parameters, count, 1.0 if quick else OPTIMIZER_SECONDS, deepspeed=missing is None
        )
        found.append(times)
        turns.append(number)
    rows = []
    for name in found[0]:
        cells = []
        for each in found:
            seconds = each.get(name)
            bare = each[optimizers.BASE]
            cells += (
                ["-", "-"] if seconds is None else [f"{seconds / num_parameters * 1e9:.2f}", f"{seconds / bare:.2f}"]
            )
        rows.append([name, *cells])
    text = f"AdamW on {num_parameters / 1e6:.1f} million parameters, the least of {min(turns)} steps or more.\n\n"
    text += table(["", "ns per parameter, 1 thread", "/ torch", "2 threads", "/ torch"], rows)
    return text if missing is None else f"{text}\n\nDeepSpeedCPUAdam is left out: {missing}."


def words_table(width: int, rounds: int, steps: int, fairscale_python: str) -> str:
    """Let the libraries take turns, in processes of their own."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*FAIRSCALE, "plain")}
    for _ in range(rounds):
        for name, runs in found.items():
            python = fairscale_python if name == "fairscale" else sys.executable
            command = [python, "-W", "ignore", str(HERE / "worker.py"), name, f"--width={width}", f"--steps={steps}"]
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
            memory = [size(min((run[key] for run in runs if key in run), default=None)) for key in kinds]
            losses = runs[0]["losses"]
            busy = min(run["busy_seconds"] for run in runs)
            cells = [f"{max(speeds):.1f}", f"{statistics.median(speeds):.1f}", f"{busy:.3f}", *memory]
            rows.append([name, *cells, f"{losses[1]:.5f}", f"{losses[steps]:.5f}"])
    about = f"Width {width}, 10 layers, 3 slices, 1 microbatch, fp32, Adam; {steps} steps, {rounds} times."
    return f"{about}\n\n{table([*heads, f'after {steps}'], rows)}"


def simulated_table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("tokens", "", "step", "stall", "planned", "copies hidden", "device peak", "planned")
    lines = []
    for row in rows:
        planned = f"{1e3 * row['planned stall']:.1f} ms" if "planned stall" in row else "-"
        hidden = "-" if row["overlap"] is None else f"{100 * row['overlap']:.0f} %"
        peaks = [f"{row['slices']:.2f}", f"{row['planned slices']:.2f}" if "planned slices" in row else "-"]
        times = [f"{1e3 * row['seconds']:.1f} ms", f"{max(0.0, 1e3 * row['stall']):.1f} ms"]
        lines.append([row["tokens"], row["name"], *times, planned, hidden, *peaks])
    return f"Eight slices, one microbatch; peaks in units of a slice's weights.\n\n{table(heads, lines)}"


def sizes_table(models: Mapping[str, tuple[int, int]], tokens: Sequence[int]) -> str:
    heads = ["model", "tokens", "clipped", "s/step", "planned", "TFLOP/s (6PN)", "peak", "planned", "reserved"]
    rows = []
    for name, (width, layers) in models.items():
        for num_tokens in tokens:
            for clip in (None, 1.0):
                cell = sizes.measure(width, layers, num_tokens, clip)
                peaks = [size(cell[key]) for key in ("peak_bytes", "predicted_peak_bytes", "reserved_bytes")]
                figures = [f"{cell['seconds']:.2f}", f"{cell['predicted_seconds']:.2f}"]
                figures.append(f"{cell['useful_flops_per_second'] / 1e12:.0f}")
                rows.append([name, num_tokens, "no" if clip is None else "yes", *figures, *peaks])
                print(rows[-1], flush=True)
    return table(heads, rows)


def size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
