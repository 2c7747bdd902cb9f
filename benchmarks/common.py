"""What all benchmarks do: parts, options, turns, ratios, tables, a line on the machine, a README, a record of results.

It runs without torch, which `benchmarks.ranks` needs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

Part = Callable[[argparse.Namespace], tuple[str, object]]
"""Measures, and returns tables, and for the record what they are made of."""


def parser(doc: str | None, repetitions: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="as small as can be; the README stays as it is")
    options.add_argument("--dry", action="store_true", help="the README stays as it is")
    options.add_argument("--results", type=Path, metavar="FOLDER", help="also write tables and figures there, as JSON")
    if repetitions is not None:
        text = "counted turns of each contestant (default: %(default)s)"
        options.add_argument("--repetitions", type=int, default=repetitions, help=text)
    return options


def run(
    script: str,
    options: argparse.ArgumentParser,
    parts: Mapping[str, Part],
    default: Iterable[str] | None = None,
    about: str = "",
) -> None:
    """Run the parts that the command line names, and report each.

    Args:
        script: of the benchmark. Where the README beside it has `<!-- PART: begin -->` and `<!-- PART: end -->`, a
            part's tables go between these marks.
        default: the parts to run where none is named; all, if not given.
        about: what is said of all parts before the line on the machine, with `{repetitions}`.
    """
    # Pages and records name parts in both ways.
    options.add_argument("only", nargs="*", metavar="PART", default=argparse.SUPPRESS, help="what to run")
    options.add_argument("--only", nargs="+", metavar="PART", default=[*(default or parts)], help="the same")
    chosen = options.parse_args()
    if unknown := [name for name in chosen.only if name not in parts]:
        options.error(f"no part `{unknown[0]}`; there are {', '.join(parts)}")
    if chosen.quick:
        chosen.repetitions = 1
    for part in chosen.only:
        text, figures = parts[part](chosen)
        report(script, part, f"{text}\n\n{about.format(**vars(chosen))}{machine()}", figures, chosen)


def report(script: str, part: str, text: str, figures: object, options: argparse.Namespace) -> None:
    """Print a part's tables; write them to a folder, and into the README, as the options say."""
    print(f"{text}\n", flush=True)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        content = {"environment": machine(), "table": text.splitlines(), "rows": figures}
        (options.results / f"{part}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    page = Path(script).with_name("README.md")
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {part}: begin -->")
    if begin and not (options.quick or options.dry):
        end = f"<!-- {part}: end -->"
        page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def take_turns(contestants: Mapping[str, Callable[[], _T]], turns: int, warm_ups: int = 1) -> dict[str, list[_T]]:
    """Call all contestants in each turn, and return what they return after the warm-ups.

    Every other turn goes in the opposite order, A B B A: so nobody always finds the caches as another has left them.
    """
    results: dict[str, list[_T]] = {name: [] for name in contestants}
    for turn in range(warm_ups + turns):
        for name in list(contestants)[:: -1 if turn % 2 else 1]:
            result = contestants[name]()
            if turn >= warm_ups:
                results[name].append(result)
    return results


def ratio(ours: Sequence[float], theirs: Sequence[float], digits: int = 2) -> str:
    """Return how many times as long ours take: by the median, and in brackets by the fastest."""
    by_median, by_fastest = statistics.median(ours) / statistics.median(theirs), min(ours) / min(theirs)
    return f"{by_median:.{digits}f} ({by_fastest:.{digits}f})"


def milliseconds(seconds: Iterable[float], digits: int = 0) -> str:
    """Return the median."""
    return f"{statistics.median(seconds) * 1e3:.{digits}f} ms"


def mebibytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def answer(*command: str) -> str:
    """Return what a command prints; nothing where it is not there, fails, or takes too long."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def gpu() -> str:
    """Return the name of the GPU."""
    return answer("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0] or "no GPU"


def machine() -> str:
    """Return what figures depend on."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "sagemaker") if find_spec(name)]
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {gpu()}, load average {os.getloadavg()[1]:.1f} over five"
        f" minutes; {platform.system()}, Python {platform.python_version()}, {', '.join(versions)}."
    )
