"""Prove on one GPU what one GPU can prove: tests, transparency tests, benchmarks; one folder of results.

Parts run in order of worth within a budget, each with a limit of its own; `--resume` goes on where a run has ended.
Without network `--wheels FOLDER` brings what the machine lacks; where there is one it fills that folder, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from benchmarks.on_gpu import wheels
from benchmarks.on_gpu.parts import JOURNAL, PARTS, ROOT, Part, over_nccl
from benchmarks.on_gpu.processes import Running, start
from benchmarks.on_gpu.record import Outcome, Record, outcome_of, tests_in

_TOGETHER: Final = 4
"""So many parts run at once that share the GPU; each starts two ranks at a time."""
_DRY_FACTOR: Final = 4
"""Limits are those of a machine with a GPU; one without is slower."""
_WORTH_SECONDS: Final = 20.0
"""Less time is not enough to start a part."""
_NEEDED: Final = (
    *("torch", "numpy", "pydantic", "transformers", "accelerate"),
    *("hypothesis", "pytest", "pytest_timeout", "xdist"),
)
"""Modules without which most parts cannot start."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.list:
        for part in options.parts:
            if part.by_default:
                print(f"{part.name:24} {part.seconds:4.0f} s  {part.title}")
        files = [part.name for part in options.parts if not part.by_default]
        print(
            f"all                               every test with a GPU in sight, {len(files)} files such as `{files[0]}`"
        )
        return 0
    began = time.monotonic()
    site = None
    if options.wheels is not None:
        if not list(options.wheels.glob("*.whl")):
            print("\n".join(wheels.fetch(options.wheels)))
            print(f"wheels are in {options.wheels}; take them along and run this again where the GPU is")
            return 0
        site = tempfile.mkdtemp(prefix="smpkit-gpu-site.")
        wheels.install(options.wheels, Path(site))
    try:
        return _run(options, site, began + options.budget)
    finally:
        if site is not None:
            shutil.rmtree(site, ignore_errors=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="say what there is to run")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these; `all` stands for test 15, file by file")
    parser.add_argument("--out", type=Path, help="the results' folder (default: benchmarks/results/GPU-DATE)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="add what a run has left out to its results")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install its wheels; empty: fetch them, and end")
    parser.add_argument("--nccl", metavar="PATH", help="a libnccl.so.2 >= 2.30: also run two ranks on the GPU over it")
    parser.add_argument("--dry-run", action="store_true", help="start every part without a GPU, as small as can be")
    options = parser.parse_args(arguments)
    known = [*PARTS, over_nccl(options.nccl)] if options.nccl else list(PARTS)
    names = {part.name for part in known}
    options.parts = known
    options.chosen = [part for part in known if part.by_default]
    if options.only:
        everything = {part.name for part in known if part.name.startswith("all:")}
        chosen = set(options.only) - {"all"} | (everything if "all" in options.only else set())
        if unknown := sorted(chosen - names):
            parser.error(f"there is no part `{unknown[0]}`; --list names them")
        options.chosen = [part for part in known if part.name in chosen]
    if options.resume is not None and options.out is not None:
        parser.error("--resume says where the results are; leave out --out")
    if options.budget <= 0:
        parser.error(f"--budget is {options.budget:g}; give seconds")
    return options


def _run(options: argparse.Namespace, site: str | None, deadline: float) -> int:
    gpu = _answer("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if not (gpu or options.dry_run):
        print("error: nvidia-smi shows no GPU; --dry-run does without one", file=sys.stderr)
        return 2
    variables = _variables(site)
    if missing := _missing(variables):
        print(
            f"error: {sys.executable} lacks {', '.join(missing)}\n"
            "hint: `scripts/lint` installs everything into .venv; PYTHON=... names another interpreter; where there is"
            " no network, take `--wheels FOLDER` along",
            file=sys.stderr,
        )
        return 2
    record = Record.read(options.resume) if options.resume is not None else Record(_facts(gpu, variables))
    folder = options.resume or options.out or _default_folder(record, dry=options.dry_run)
    left = [part for part in options.chosen if not (known := record.outcomes.get(part.name)) or not known.is_over]
    print(f"{len(left)} parts; results in {folder}", flush=True)
    with tempfile.TemporaryDirectory(prefix="smpkit-gpu.") as scratch, _mps(options, Path(scratch)) as sharing:
        left = [
            replace(part, environment={**part.environment, **sharing}) if part.name == "nccl" else part for part in left
        ]
        _Queue(left, record, folder, Path(scratch), variables, dry=options.dry_run).run(deadline)
    bad = [outcome.name for outcome in record.outcomes.values() if outcome.state != "passed"]
    print(f"{len(record.outcomes) - len(bad)} parts passed" + (f"; not: {', '.join(bad)}" if bad else ""))
    print(f"{folder}/summary.md")
    return 1 if bad else 0


@dataclass
class _Queue:
    """Starts parts in their order, several at a time where they may share the machine."""

    waiting: list[Part]
    record: Record
    folder: Path
    scratch: Path
    variables: dict[str, str]
    dry: bool
    running: dict[Part, Running] = field(default_factory=dict)

    def run(self, deadline: float) -> None:
        try:
            while self.waiting or self.running:
                self._start_next(deadline - time.monotonic())
                for part, running in list(self.running.items()):
                    if running.is_over or running.is_late:
                        self._end(part, running)
                time.sleep(0.05)
        finally:
            for part, running in list(self.running.items()):
                self._end(part, running)
            self.record.write(self.folder)

    def _start_next(self, left: float) -> None:
        while self.waiting and self._has_room(self.waiting[0]):
            part = self.waiting.pop(0)
            if left < _WORTH_SECONDS:
                outcome = Outcome(part.name, part.title, "not run", 0.0, None)
                self.record.outcomes.setdefault(part.name, outcome)
                continue
            print(f"start  {part.name}", flush=True)
            variables = {**self.variables, **part.environment, JOURNAL: str(self._journal(part))}
            output = self._journal(part).with_suffix(".out")
            command = part.dry if self.dry else part.command
            seconds = part.seconds * (_DRY_FACTOR if self.dry else 1)
            self.running[part] = start(command, output, variables, ROOT, min(seconds, left))

    def _has_room(self, part: Part) -> bool:
        if self.dry:
            return len(self.running) < max(2, min(_TOGETHER, os.cpu_count() or 1))
        return not self.running or (
            len(self.running) < _TOGETHER and not part.is_alone and not any(each.is_alone for each in self.running)
        )

    def _end(self, part: Part, running: Running) -> None:
        del self.running[part]
        late = not running.is_over
        status, seconds = running.end(), running.seconds
        why = f"killed after {seconds:.0f} s" if late else f"its process ended with status {status}"
        tests = tests_in(self._journal(part), ended=why) if part.has_tests else ()
        output = running.output.read_text(encoding="utf-8", errors="replace")
        outcome = outcome_of(part.name, part.title, tests, status=status, seconds=seconds, late=late, output=output)
        self.record.outcomes[part.name] = outcome
        self.record.write(self.folder)
        print(f"{outcome.state:6} {part.name} ({seconds:.0f} s)", flush=True)

    def _journal(self, part: Part) -> Path:
        return self.scratch / f"{part.name.replace('/', '.')}.jsonl"


def _variables(site: str | None) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "estimator"), str(ROOT / "container"), *([site] if site else [])]
    return {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Ranks are forked from a server; where that had asked CUDA for GPUs, they could not use them.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def _missing(variables: dict[str, str]) -> list[str]:
    """Return the modules that the parts need and this interpreter cannot find."""
    code = "import sys, importlib.util as u; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
    done = subprocess.run(
        [sys.executable, "-c", code, *_NEEDED],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )
    return done.stdout.split()


def _facts(gpu: str, variables: dict[str, str]) -> dict[str, str]:
    code = """
import importlib.metadata, os, platform, torch
print(platform.platform(), "Python", platform.python_version(), os.cpu_count(), "cores")
for name in "torch triton numpy transformers accelerate pydantic pytest trl torchtune deepspeed fairscale".split():
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not there")
print("CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
if torch.cuda.is_available():
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())), torch.cuda.get_device_properties(0))
print(" ".join(torch.cuda.get_arch_list()))
"""
    versions = _answer(sys.executable, "-W", "ignore", "-c", code, variables=variables)
    commit = _answer("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown"
    return {
        "gpu": gpu.splitlines()[0] if gpu else "no GPU",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": f"commit {commit}\n{versions}\n",
        "nvidia-smi": (_answer("nvidia-smi") or "none") + "\n",
    }


def _answer(*command: str, variables: dict[str, str] | None = None) -> str:
    """Return what a command prints; nothing where it is not there, fails, or takes too long."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **(variables or {})}
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _default_folder(record: Record, *, dry: bool) -> Path:
    if dry:
        return Path(tempfile.mkdtemp(prefix="smpkit-gpu-dry."))
    words = record.facts["gpu"].lower().replace("nvidia", "").split()
    return ROOT / "benchmarks/results" / "-".join([*words[:1], record.facts["date"]])


@contextlib.contextmanager
def _mps(options: argparse.Namespace, scratch: Path) -> Iterator[dict[str, str]]:
    """Let processes share the GPU at the same time, where its service is installed and NCCL asks for it."""
    service = shutil.which("nvidia-cuda-mps-control")
    if options.nccl is None or options.dry_run or service is None:
        yield {}
        return
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(scratch / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(scratch / "mps")}
    (scratch / "mps").mkdir()
    environment = {**os.environ, **variables}
    started = subprocess.run([service, "-d"], env=environment, check=False, capture_output=True, timeout=30)
    try:
        yield variables if started.returncode == 0 else {}
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([service], input=b"quit\n", env=environment, check=False, capture_output=True, timeout=30)


if __name__ == "__main__":
    sys.exit(main())
