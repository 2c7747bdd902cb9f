"""Prove on one GPU what one GPU can prove: tests, transparency tests, benchmarks; one folder of results.

Parts run in order of worth within a budget, each with a limit of its own; `--resume` goes on where a run has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Final

from benchmarks.common import answer, gpu
from benchmarks.on_gpu.parts import JOURNAL, PARTS, ROOT, Part, over_nccl
from benchmarks.on_gpu.record import Outcome, Record, tests_in
from tests.leftovers import kill_processes_with

_TOGETHER: Final = 4
"""How many parts that share the GPU run at once; each starts two ranks at a time."""
_DRY_FACTOR: Final = 4
"""Limits are those of a machine with a GPU; one without is slower."""
_WORTH_SECONDS: Final = 20.0
"""Less time is not enough to start a part."""
_MOST_OUTPUT: Final = 24 << 10
"""How many characters are kept of what a part printed."""
_MARK: Final = "GPU_PART"
"""A variable that a part's processes inherit, by which they are found wherever they have gone."""
_NO_TESTS: Final = 5
"""Pytest's status where all of a file's tests are left out by its `-m`."""
_VARIABLES: Final = {
    "PYTHONUNBUFFERED": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    # Ranks are forked from a server; where that had asked CUDA for GPUs, they could not use them.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_NEEDED: Final = (
    *("torch", "numpy", "transformers", "accelerate", "hypothesis", "pytest", "pytest_timeout", "xdist"),
    *("click", "cloudpickle", "jinja2", "pathspec", "yaml", "ruamel", "safetensors", "tqdm"),
)
"""Modules without which most parts cannot start."""


def main() -> int:
    options = _options()
    if options.list:
        print("\n".join(f"{part.name:24} {part.seconds:4.0f} s  {part.title}" for part in PARTS))
        return 0
    deadline = time.monotonic() + options.budget
    if gpu() == "no GPU" and not options.dry_run:
        sys.exit("error: nvidia-smi shows no GPU; --dry-run does without one")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        hint = "hint: `scripts/lint` installs everything into .venv; PYTHON=... names another interpreter"
        sys.exit(f"error: {sys.executable} lacks {' '.join(missing)}\n{hint}")
    os.environ.update(_VARIABLES)
    record = Record.read(options.resume) if options.resume is not None else Record(facts=_facts())
    folder = options.resume or options.out or _default_folder(record, dry=options.dry_run)
    over = [outcome.name for outcome in record.outcomes if outcome.state in ("passed", "failed")]
    parts = [*PARTS, over_nccl(options.nccl)] if options.nccl else PARTS
    left = [part for part in parts if part.name not in over and (not options.only or part.name in options.only)]
    print(f"{len(left)} parts; results in {folder}", flush=True)
    _run_all(left, record, folder, deadline, dry=options.dry_run)
    bad = [outcome.name for outcome in record.outcomes if outcome.state != "passed"]
    print(f"{len(record.outcomes) - len(bad)} parts passed" + (f"; not: {', '.join(bad)}" if bad else ""))
    print(f"{folder}/summary.md")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [*(part.name for part in PARTS), "nccl"]
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="say what there is to run")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=names, help="run these")
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--out", type=Path, help="the results' folder (default: benchmarks/results/GPU-DATE)")
    folder.add_argument("--resume", type=Path, metavar="FOLDER", help="add what a run has left out to its results")
    parser.add_argument("--nccl", metavar="PATH", help="a libnccl.so.2 >= 2.30: also run two ranks on the GPU over it")
    parser.add_argument("--dry-run", action="store_true", help="start every part without a GPU, as small as can be")
    options = parser.parse_args()
    if "nccl" in (options.only or ()) and not options.nccl:
        parser.error("the part `nccl` needs a library: --nccl PATH")
    return options


# --- parts as processes -----------------------------------------------------------------------------------------------


def _run_all(parts: Sequence[Part], record: Record, folder: Path, deadline: float, *, dry: bool) -> None:
    """Run parts in their order, several at a time where they may share the machine; write the record after each."""
    with tempfile.TemporaryDirectory(prefix="smpkit-gpu.") as scratch:
        for alone, group in groupby(parts, key=lambda part: part.is_alone and not dry):
            with ThreadPoolExecutor(1 if alone else min(_TOGETHER, os.cpu_count() or 1)) as pool:
                try:
                    runs = [pool.submit(_run, part, Path(scratch), deadline, dry=dry) for part in group]
                    for outcome in (run.result() for run in as_completed(runs)):
                        record.add(outcome)
                        record.write(folder)
                        print(f"{outcome.state:6} {outcome.name} ({outcome.seconds:.0f} s)", flush=True)
                finally:  # somebody has interrupted this one, and nobody will wait for the parts
                    pool.shutdown(wait=False, cancel_futures=True)
                    kill_processes_with(f"{_MARK}={os.getpid()}.")


def _run(part: Part, scratch: Path, deadline: float, *, dry: bool) -> Outcome:
    """Run a part in a session of its own, until its limit or the end of the budget, and say how it ended."""
    began = time.monotonic()
    if deadline - began < _WORTH_SECONDS:
        return Outcome(name=part.name, title=part.title, state="not run")
    print(f"start  {part.name}", flush=True)
    journal, printed = scratch / f"{part.name}.jsonl", scratch / f"{part.name}.out"
    mark = f"{os.getpid()}.{part.name}."
    status = None
    with printed.open("wb") as file, contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [sys.executable, *(part.dry if dry else part.command)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **part.environment, JOURNAL: str(journal), _MARK: mark},
            start_new_session=True,
            timeout=min(part.seconds * (_DRY_FACTOR if dry else 1), deadline - began),
            check=False,
        )
        status = done.returncode
    kill_processes_with(f"{_MARK}={mark}")  # ranks have sessions of their own where torchrun started them
    seconds = time.monotonic() - began
    why = f"killed after {seconds:.0f} s" if status is None else f"its process ended with status {status}"
    tests, output = tests_in(journal, ended=why), printed.read_text("utf-8", "replace")
    is_good = status == 0 or (status == _NO_TESTS and not tests)
    return Outcome(
        name=part.name,
        title=part.title,
        state="over its limit" if status is None else "passed" if is_good else "failed",
        seconds=seconds,
        status=status,
        tests=tests,
        output="" if tests and is_good else output[-_MOST_OUTPUT:],
    )


# --- the machine ------------------------------------------------------------------------------------------------------


def _facts() -> dict[str, str]:
    # In a process of its own, since the one that asks takes memory of the GPU.
    code = """
import torch
print("CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(), *torch.cuda.get_arch_list())
if torch.cuda.is_available():
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())), torch.cuda.get_device_properties(0))
"""
    commit = answer("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown"
    packages = {f"{package.name} {package.version}" for package in importlib.metadata.distributions()}
    versions = [
        f"commit {commit}",
        f"{platform.platform()} Python {platform.python_version()} {os.cpu_count()} cores",
        answer(sys.executable, "-W", "ignore", "-c", code),
        ", ".join(sorted(packages, key=str.lower)),
    ]
    return {
        "gpu": gpu(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": "\n".join(versions),
        "nvidia-smi": answer("nvidia-smi") or "none",
    }


def _default_folder(record: Record, *, dry: bool) -> Path:
    if dry:
        return Path(tempfile.mkdtemp(prefix="smpkit-gpu-dry."))
    words = record.facts["gpu"].lower().replace("nvidia", "").split()
    return ROOT / "benchmarks/results" / "-".join([*words[:1], record.facts["date"]])


if __name__ == "__main__":
    sys.exit(main())
