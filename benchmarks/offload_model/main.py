"""OffloadModel beside FairScale, its optimizer beside torch's and DeepSpeed's; steps in virtual time; large models."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload_model import deepspeed_adam, optimizers, sizes
from benchmarks.offload_model.simulated import simulated_rows
from smpkit.plan.offload.model import Machine

HERE = Path(__file__).parent
FAIRSCALE = ("fairscale", "smpkit", "smpkit fast")
FAIRSCALE_WIDTH = 2048
OPTIMIZER_SECONDS = 25.0  # per number of threads, so that this part ends within three minutes with what is compiled


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes; the README stays as it is")
    parser.add_argument("--dry", action="store_true", help="the README stays as it is")
    parser.add_argument("--only", choices=["optimizer", "words", "simulated", "sizes"], help="run one part")
    parser.add_argument("--fairscale-python", default=sys.executable, help="a Python that has fairscale 0.4.13")
    parser.add_argument("--build-seconds", type=float, default=60, help="the most that compiling DeepSpeed may take")
    parser.add_argument("--width", type=int, help="of FairScale's model; 2048 on a GPU, 512 without one")
    parser.add_argument("--rounds", type=int, default=3, help="how often the libraries take turns at words")
    parser.add_argument("--steps", type=int, default=5, help="that are timed, behind two that warm up")
    parser.add_argument("--models", nargs="+", choices=[*sizes.SIZES], help="of sizes; all if not given")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"of a step of sizes, in place of {sizes.TOKENS}")
    parser.add_argument("--results", type=Path, help="also write the rows of simulated to this folder")
    options = parser.parse_args(arguments)
    save = not (options.quick or options.dry)
    if options.only in (None, "optimizer"):
        table = optimizer_table(1 << 20 if options.quick else 32 << 20, options.build_seconds, quick=options.quick)
        report("optimizer", table, save=save)
    if options.only in (None, "words"):
        width = options.width or (128 if options.quick else FAIRSCALE_WIDTH if torch.cuda.is_available() else 512)
        rounds = 1 if options.quick else options.rounds
        table = words_table(width, rounds, options.steps, options.fairscale_python)
        report("words" if width != FAIRSCALE_WIDTH else "words of its own width", table, save=save)
    if options.only in (None, "sizes"):
        if torch.cuda.is_available() or options.quick:
            chosen = (
                sizes.TINY if options.quick else {name: sizes.SIZES[name] for name in options.models or sizes.SIZES}
            )
            report("sizes", sizes_table(chosen, [1024] if options.quick else options.tokens or sizes.TOKENS), save=save)
        else:
            print("the large models are left out: torch sees no GPU")
    # Last, and not beside a GPU: a process has one accelerator, and a simulated one would take the place of a real one.
    if options.only == "simulated" or (options.only is None and not torch.cuda.is_available()):
        rows = simulated_rows()
        report("simulated", simulated_table(rows), save=save)
        if options.results is not None:
            options.results.mkdir(parents=True, exist_ok=True)
            content = {"environment": environment(), "rows": rows}
            (options.results / "simulated.json").write_text(json.dumps(content, indent=2) + "\n")
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
    lines = ["| | ns per parameter, 1 thread | / torch | 2 threads | / torch |", "|---|---|---|---|---|"]
    for name in found[0]:
        cells = []
        for each in found:
            seconds = each.get(name)
            bare = each[optimizers.BASE]
            cells += (
                ["-", "-"] if seconds is None else [f"{seconds / num_parameters * 1e9:.2f}", f"{seconds / bare:.2f}"]
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = f"AdamW on {num_parameters / 1e6:.1f} million parameters, the least of {min(turns)} steps or more.\n\n"
    table += "\n".join(lines)
    return table if missing is None else f"{table}\n\nDeepSpeedCPUAdam is left out: {missing}."


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
    head = "| | words/s, best | median | CPU s/step | peak host | peak device | reserved | loss after 1 step"
    lines = [f"{head} | after {steps} |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        if runs:
            speeds = [run["words_per_second"] for run in runs]
            kinds = ("host_bytes", "device_bytes", "reserved_bytes")
            memory = [size(min((run[key] for run in runs if key in run), default=None)) for key in kinds]
            losses = runs[0]["losses"]
            busy = min(run["busy_seconds"] for run in runs)
            cells = [f"{max(speeds):.1f}", f"{statistics.median(speeds):.1f}", f"{busy:.3f}", *memory]
            lines.append(f"| {name} | {' | '.join(cells)} | {losses[1]:.5f} | {losses[steps]:.5f} |")
    return (
        f"Width {width}, 10 layers, 3 slices, 1 microbatch, fp32, Adam; {steps} steps, {rounds} times.\n\n"
        + "\n".join(lines)
    )


def simulated_table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("tokens", "", "step", "stall", "planned", "copies hidden", "device peak", "planned")
    lines = [f"| {' | '.join(heads)} | step on a GPU | peak on a GPU |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        planned = f"{1e3 * row['planned stall']:.1f} ms" if "planned stall" in row else "-"
        hidden = "-" if row["overlap"] is None else f"{100 * row['overlap']:.0f} %"
        peaks = [f"{row['slices']:.2f}", f"{row['planned slices']:.2f}" if "planned slices" in row else "-"]
        lines.append(
            f"| {row['tokens']} | {row['name']} | {1e3 * row['seconds']:.1f} ms "
            f"| {max(0.0, 1e3 * row['stall']):.1f} ms | {planned} | {hidden} | {' | '.join(peaks)} | | |"
        )
    return "Eight slices, one microbatch; peaks in units of a slice's weights.\n\n" + "\n".join(lines)


def sizes_table(models: Mapping[str, tuple[int, int]], tokens: Sequence[int]) -> str:
    lines = ["| model | tokens | clipped | s/step | planned | TFLOP/s (6PN) | peak | planned | reserved |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, (width, layers) in models.items():
        for num_tokens in tokens:
            for clip in (None, 1.0):
                cell = sizes.measure(width, layers, num_tokens, Machine(), clip=clip)
                peaks = [size(cell[key]) for key in ("peak_bytes", "predicted_peak_bytes", "reserved_bytes")]
                lines.append(
                    f"| {name} | {num_tokens} | {'no' if clip is None else 'yes'} | {cell['seconds']:.2f} "
                    f"| {cell['predicted_seconds']:.2f} | {cell['useful_flops_per_second'] / 1e12:.0f} "
                    f"| {' | '.join(peaks)} |"
                )
                print(lines[-1], flush=True)
    return "\n".join(lines)


def size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"


def report(part: str, table: str, *, save: bool) -> None:
    """Print a table; save: write it into the README, between the marks of its part."""
    text = f"{table}\n\n{environment()}\n"
    print(text, flush=True)
    if save:
        readme, begin, end = HERE / "README.md", f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->\n"
        before, rest = readme.read_text().split(begin)
        readme.write_text(before + begin + text + end + rest.split(end)[1])


def environment() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {device}, load average {os.getloadavg()[0]:.1f}; "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}."
    )


if __name__ == "__main__":
    sys.exit(main())
