"""Prove on one GPU what one GPU can prove: tests, transparency tests, benchmarks; one folder of results.

Parts run in order of worth within a budget, each with a limit of its own; `--resume` goes on where a run has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from benchmarks.on_gpu.parts import JOURNAL, PARTS, ROOT, Part, over_nccl
from benchmarks.on_gpu.record import Outcome, Record, tests_in

_TOGETHER: Final = 4
"""How many parts that share the GPU run at once; each starts two ranks at a time."""
_DRY_FACTOR: Final = 4
"""Limits are those of a machine with a GPU; one without is slower."""
_WORTH_SECONDS: Final = 20.0
"""Less time is not enough to start a part."""
_GRACE_SECONDS: Final = 3.0
_MOST_OUTPUT: Final = 24 << 10
"""How many characters are kept of what a part printed."""
_NO_TESTS: Final = 5
"""Pytest's status where all of a file's tests are left out by its `-m`."""
_MARK: Final = "GPU_PART"
"""A variable that a part's processes inherit, by which they are found wherever they have gone."""
_NEEDED: Final = [
    *("torch", "numpy", "transformers", "accelerate", "hypothesis", "pytest", "pytest_timeout", "xdist"),
    *("click", "cloudpickle", "jinja2", "pathspec", "pydantic", "yaml", "ruamel.yaml", "safetensors", "tqdm"),
]
"""Modules without which most parts cannot start."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.list:
        print("\n".join(f"{part.name:24} {part.seconds:4.0f} s  {part.title}" for part in PARTS))
        return 0
    deadline = time.monotonic() + options.budget
    with tempfile.TemporaryDirectory(prefix="smpkit-gpu.") as scratch:
        return _run(options, Path(scratch), deadline)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="say what there is to run")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these")
    parser.add_argument("--out", type=Path, help="the results' folder (default: benchmarks/results/GPU-DATE)")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="add what a run has left out to its results")
    parser.add_argument("--nccl", metavar="PATH", help="a libnccl.so.2 >= 2.30: also run two ranks on the GPU over it")
    parser.add_argument("--dry-run", action="store_true", help="start every part without a GPU, as small as can be")
    options = parser.parse_args(arguments)
    parts = [*PARTS, over_nccl(options.nccl)] if options.nccl else list(PARTS)
    if options.only and (unknown := sorted(set(options.only) - {part.name for part in parts})):
        parser.error(f"there is no part `{unknown[0]}`; --list names them")
    options.chosen = [part for part in parts if not options.only or part.name in options.only]
    if options.resume is not None and options.out is not None:
        parser.error("--resume says where the results are; leave out --out")
    if options.budget <= 0:
        parser.error(f"--budget is {options.budget:g}; give seconds")
    return options


def _run(options: argparse.Namespace, scratch: Path, deadline: float) -> int:
    gpu = _answer("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if not (gpu or options.dry_run):
        print("error: nvidia-smi shows no GPU; --dry-run does without one", file=sys.stderr)
        return 2
    variables = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'estimator'}:{ROOT / 'container'}:{os.getenv('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Ranks are forked from a server; where that had asked CUDA for GPUs, they could not use them.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    code = "import sys, importlib.util as u; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
    if missing := _answer(sys.executable, "-c", code, *_NEEDED, variables=variables):
        print(
            f"error: {sys.executable} lacks {missing}\n"
            "hint: `scripts/lint` installs everything into .venv; PYTHON=... names another interpreter",
            file=sys.stderr,
        )
        return 2
    record = Record.read(options.resume) if options.resume is not None else Record(_facts(gpu, variables))
    folder = options.resume or options.out or _default_folder(record, dry=options.dry_run)
    left = [part for part in options.chosen if not (known := record.outcomes.get(part.name)) or not known.is_over]
    print(f"{len(left)} parts; results in {folder}", flush=True)
    _Queue(left, record, folder, scratch, variables, options.dry_run).run(deadline)
    bad = [outcome.name for outcome in record.outcomes.values() if outcome.state != "passed"]
    print(f"{len(record.outcomes) - len(bad)} parts passed" + (f"; not: {', '.join(bad)}" if bad else ""))
    print(f"{folder}/summary.md")
    return 1 if bad else 0


# --- parts as processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Running:
    """A part that runs in a process group of its own."""

    process: subprocess.Popen[bytes]
    journal: Path
    output: Path
    started: float
    limit: float
    mark: str

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def end(self) -> int:
        """End what is left of it, and return its exit status; negative: the signal that ended it.

        Ranks have sessions of their own where torchrun started them, so they are found by what they inherited.
        """
        if self.process.poll() is None:
            self.process.terminate()  # torchrun ends its ranks, pytest its workers
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_SECONDS)
        marked = f"{_MARK}={self.mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marked in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
        return self.process.wait()


@dataclass
class _Queue:
    """Starts parts in their order, several at a time where they may share the machine."""

    waiting: list[Part]
    record: Record
    folder: Path
    scratch: Path
    variables: Mapping[str, str]
    dry: bool

    def run(self, deadline: float) -> None:
        running: dict[Part, _Running] = {}
        try:
            while self.waiting or running:
                while self.waiting and self._has_room(self.waiting[0], running):
                    part, left = self.waiting.pop(0), deadline - time.monotonic()
                    if left < _WORTH_SECONDS:
                        self.record.outcomes.setdefault(part.name, Outcome(part.name, part.title, "not run"))
                    else:
                        running[part] = self._start(part, left)
                for part, process in list(running.items()):
                    if process.process.poll() is not None or process.seconds > process.limit:
                        self._end(part, running.pop(part))
                time.sleep(0.05)
        finally:
            for part, process in running.items():
                self._end(part, process)
            self.record.write(self.folder)

    def _has_room(self, part: Part, running: Mapping[Part, _Running]) -> bool:
        if self.dry:
            return len(running) < max(2, min(_TOGETHER, os.cpu_count() or 1))
        is_measured = part.is_alone or any(each.is_alone for each in running)
        return not running or (len(running) < _TOGETHER and not is_measured)

    def _start(self, part: Part, left: float) -> _Running:
        print(f"start  {part.name}", flush=True)
        journal, output = self.scratch / f"{part.name}.jsonl", self.scratch / f"{part.name}.out"
        limit = min(part.seconds * (_DRY_FACTOR if self.dry else 1), left)
        mark = f"{os.getpid()}.{part.name}"
        variables = {**self.variables, **part.environment, JOURNAL: str(journal), _MARK: mark}
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *(part.dry if self.dry else part.command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        return _Running(process, journal, output, time.monotonic(), limit, mark)

    def _end(self, part: Part, running: _Running) -> None:
        late = running.process.poll() is None
        status, seconds = running.end(), running.seconds
        why = f"killed after {seconds:.0f} s" if late else f"its process ended with status {status}"
        tests, output = tests_in(running.journal, ended=why), running.output.read_text("utf-8", "replace")
        is_good = status == 0 or (status == _NO_TESTS and not tests)
        state = "over its limit" if late else "passed" if is_good else "failed"
        shown = "" if tests and is_good else output[-_MOST_OUTPUT:]
        outcome = Outcome(part.name, part.title, state, seconds, status, tests, shown)
        self.record.outcomes[part.name] = outcome
        self.record.write(self.folder)
        print(f"{outcome.state:6} {part.name} ({seconds:.0f} s)", flush=True)


# --- the machine ------------------------------------------------------------------------------------------------------


def _facts(gpu: str, variables: Mapping[str, str]) -> dict[str, str]:
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
    commit = _answer("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown"
    return {
        "gpu": gpu.splitlines()[0] if gpu else "no GPU",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "versions": f"commit {commit}\n" + _answer(sys.executable, "-W", "ignore", "-c", code, variables=variables),
        "nvidia-smi": _answer("nvidia-smi") or "none",
    }


def _answer(*command: str, variables: Mapping[str, str] | None = None) -> str:
    """Return what a command prints; nothing where it is not there, fails, or takes too long."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        environment = {**os.environ, **(variables or {})}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _default_folder(record: Record, *, dry: bool) -> Path:
    if dry:
        return Path(tempfile.mkdtemp(prefix="smpkit-gpu-dry."))
    words = record.facts["gpu"].lower().replace("nvidia", "").split()
    return ROOT / "benchmarks/results" / "-".join([*words[:1], record.facts["date"]])


if __name__ == "__main__":
    sys.exit(main())
