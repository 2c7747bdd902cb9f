"""Take activations to the host in several ways, in turns, on the same model; write the tables of README.md.

Parts: `bytes` counts what moves per block, `link` compares steps over an emulated link with the simulator, `simulated`
steps on the simulated accelerator, in virtual time; `gpu` (where there is one) times training steps and one stage of a
pipeline.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.activation_offload.counted import bytes_table
from benchmarks.activation_offload.emulated import link_table
from benchmarks.activation_offload.gpu import gpu_tables
from benchmarks.activation_offload.simulated import simulated_table
from benchmarks.activation_offload.training import FULL, TINY

HERE: Final = Path(__file__).parent

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)}; none: all that can run here")
    parser.add_argument("--results", type=Path, help="also write each part's rows and environment to this folder")
    parser.add_argument("--dry", action="store_true", help="leave README.md as it is")
    parser.add_argument("--tokens", type=int, nargs="+", help="gpu: of a training step, in place of 8192, 16384, 32768")
    parser.add_argument("--only-steps", action="store_true", help="gpu: training steps only")
    parser.add_argument("--tiny", action="store_true", help="gpu: sizes that prove nothing, for the CPU too")
    options = parser.parse_args(arguments)
    sizes = TINY if options.tiny else FULL
    if options.tokens:
        sizes = replace(sizes, tokens=tuple(options.tokens))
    if unknown := sorted(set(options.parts) - _PARTS.keys()):
        parser.error(f"no part `{unknown[0]}`; there are {', '.join(_PARTS)}")
    # A process has one accelerator: a simulated one would take the place of a real one.
    left_out = "simulated" if torch.cuda.is_available() else "gpu"
    chosen = options.parts or [each for each in _PARTS if each != left_out]
    for name in chosen:
        make, show = _PARTS[name]
        rows = gpu_tables(sizes, only_steps=options.only_steps) if make is None else make()
        text = f"{show(rows)}\n\n{environment()}"
        print(f"\n{name}\n\n{text}")
        if options.results is not None:
            options.results.mkdir(parents=True, exist_ok=True)
            content = {"environment": environment(), "rows": rows}
            (options.results / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
        if not options.dry:
            write(name, text)
    return 0


def environment() -> str:
    """Return what the numbers depend on."""
    cores, load = os.cpu_count(), os.getloadavg()[1]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{cores} cores ({platform.machine()}), {device}, load average {load:.1f} over five minutes; "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s)."
    )


def write(part: str, text: str) -> None:
    """Replace a part of README.md."""
    readme = HERE / "README.md"
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    found = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", readme.read_text(), flags=re.DOTALL)
    readme.write_text(found)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bytes(rows: Sequence[Row]) -> str:
    heads = ["", "out", "back", "on the device after forward", "gradients"]
    return table(heads, [_bytes_cells(row) for row in rows])


def _bytes_cells(row: Row) -> list[str]:
    if "absent" in row:
        return [row["name"], f"not run: {row['absent']}", "", "", ""]
    units = [f"{row[name]:.2f}" for name in ("out", "back", "kept")]
    return [row["name"], *units, "same bits" if row["same"] else "DIFFERENT"]


def _link(rows: Sequence[Row]) -> str:
    heads = ["order", "copy / forward", "lead", "measured / predicted", "stall, predicted", "peak, predicted"]
    return table(heads, [_link_cells(row) for row in rows])


def _link_cells(row: Row) -> list[str]:
    # Sleeping takes longer than asked for; what the step takes without offloading has that, too.
    ratio = row["seconds"] / (row["plain"] + row["predicted_stall"])
    stall = f"{1e3 * row['stall']:.0f} ms, {1e3 * row['predicted_stall']:.0f} ms"
    peak = f"{row['peak']:.0f}, {row['predicted_peak']:.0f}"
    return [row["order"], f"{row['copy']:g}", str(row["lead"]), f"{ratio:.3f}", stall, peak]


def _simulated(rows: Sequence[Row]) -> str:
    heads = ["order", "copy / forward", "", "step", "stall", "planned", "copies hidden", "inputs held", "planned"]
    heads += ["step on a GPU", "inputs held on a GPU"]
    return table(heads, [_simulated_cells(row) for row in rows])


def _simulated_cells(row: Row) -> list[str]:
    seconds = [f"{1e3 * row['seconds']:.1f} ms", f"{max(0.0, 1e3 * row['stall']):.1f} ms"]
    planned = f"{1e3 * row['predicted']:.1f} ms" if "predicted" in row else "-"
    hidden = "-" if row["overlap"] is None else f"{100 * row['overlap']:.0f} %"
    held = [f"{row['boundaries']:.0f}", f"{row.get('predicted boundaries', '-'):.0f}" if "predicted" in row else "-"]
    return [row["order"], f"{row['copy']:.2f}", row["name"], *seconds, planned, hidden, *held, "", ""]


def _gpu(rows: Sequence[Row]) -> str:
    parts = []
    for title in dict.fromkeys(row["table"] for row in rows):
        own = [{k: v for k, v in row.items() if k != "table"} for row in rows if row["table"] == title]
        heads = list(dict.fromkeys(key for row in own for key in row))
        parts.append(f"{title}\n\n{table(heads, [[_text(row.get(head, '')) for head in heads] for row in own])}")
    return "\n\n".join(parts)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_PARTS: Final[Mapping[str, tuple[Callable[[], list[Row]] | None, Callable[[Sequence[Row]], str]]]] = {
    "bytes": (bytes_table, _bytes),
    "link": (link_table, _link),
    "simulated": (simulated_table, _simulated),
    "gpu": (None, _gpu),  # takes sizes
}


if __name__ == "__main__":
    raise SystemExit(main())
