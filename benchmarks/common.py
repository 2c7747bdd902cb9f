"""What all benchmarks do: ranks, turns, medians, tables, a line on the machine, a README and a record of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from smpkit.testing import run_ranks

_T = TypeVar("_T")


def parser(doc: str | None, repetitions: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="as small as can be; the README stays as it is")
    options.add_argument("--dry", action="store_true", help="the README stays as it is")
    options.add_argument("--results", type=Path, metavar="FOLDER", help="also write tables and figures there, as JSON")
    if repetitions is not None:
        text = "counted steps of each (default: %(default)s)"
        options.add_argument("--repetitions", type=int, default=repetitions, help=text)
    return options


def on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call a function on ranks with one thread each, where runs are recorded as in a job; return what they return."""
    return run_ranks(function, size, *arguments, timeout=1800, env={"SMPKIT_SUMMARY": "1"})


def prepare_rank() -> None:
    """Let a rank compute in one thread, and keep torch's warnings out of the tables."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")


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


def seconds_until_all_are_done(step: Callable[[], object], settle: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of a step from a barrier until the last rank is done.

    Args:
        settle: waits for the device.
    """
    dist.barrier()
    start = time.perf_counter()
    step()
    settle()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def ratio(ours: Sequence[float], theirs: Sequence[float], digits: int = 2) -> str:
    """Return how many times as long ours take: by the median, and in brackets by the fastest."""
    by_median, by_fastest = statistics.median(ours) / statistics.median(theirs), min(ours) / min(theirs)
    return f"{by_median:.{digits}f} ({by_fastest:.{digits}f})"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def machine() -> str:
    """Return what figures depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {device}, load average {os.getloadavg()[1]:.1f} over five"
        f" minutes; {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}."
    )


def report(readme: Path, part: str, text: str, options: argparse.Namespace, figures: object = None) -> None:
    """Print a part's tables; write them between its marks in the README, unless the options say no, and to a folder.

    Args:
        readme: of the benchmark; it has `<!-- PART: begin -->` and `<!-- PART: end -->`.
        figures: what the tables were made of, for the record.
    """
    print(f"{text}\n", flush=True)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        content = {"environment": machine(), "table": text.splitlines(), "rows": figures}
        (options.results / f"{part}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not (options.quick or options.dry):
        write(readme, part, text)


def write(page: Path, part: str, text: str) -> None:
    """Put a part's tables between its marks in a page."""
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
