"""Look at this machine, one finding for each thing; a problem is only what the job in question cannot do without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import smpkit
from smpkit import compilers
from smpkit.config.job import JobConfig
from smpkit.units import amount, things
from smpkit_container.mpi import find_mpirun
from smpkit_estimator import docker
from smpkit_estimator.backend import Finding, tried

_SMALL_SHARED_BYTES: Final = 64 * 2**20
_LEAST_TORCH: Final = (2, 11)
_INSTALL_TORCH: Final = (
    "`pip install 'smpkit[torch]'`; without a GPU add `--extra-index-url https://download.pytorch.org/whl/cpu`, "
    "which brings a much smaller PyTorch"
)
_WITH_TORCH: Final = (
    ("CUDA", "nvidia-cuda-runtime"), ("CUDA", "nvidia-cuda-runtime-cu12"),
    ("NCCL", "nvidia-nccl-cu13"), ("NCCL", "nvidia-nccl-cu12"),
)  # fmt: skip
"""What is installed beside a torch for GPUs."""


def runs_here(job: JobConfig) -> bool:
    """Tell whether a job is for this machine, and so needs no back end."""
    return job.compute.is_local and job.backend.chosen is None


def check_machine(job: JobConfig | None = None, shared: Path = Path("/dev/shm")) -> list[Finding]:  # noqa: S108
    """Look at versions, GPUs, launchers and memory; only a local job makes something that is missing a problem."""
    launcher = job.distribution.launcher if job is not None and runs_here(job) else None
    return [
        Finding("smpkit", "ok", f"smpkit {smpkit.__version__}, Python {'.'.join(map(str, sys.version_info[:3]))}"),
        _torch(needed=launcher is not None),
        _gpus(),
        tried("mpirun", lambda: Finding("mpirun", "ok", f"mpirun: {find_mpirun()}"), needed=launcher == "mpirun"),
        tried("docker", _docker, needed=False),
        _compiler(),
        *_shared_memory(shared),
        *_memory(),
    ]


def _torch(*, needed: bool) -> Finding:
    version = version_of("torch")
    if version is None:
        text = "torch is not installed here (needed in the image and for `smpkit run`)"
        return Finding("torch", "problem" if needed else "info", text, _INSTALL_TORCH)
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if release < _LEAST_TORCH:
        text = f"torch {version} is too old: smpkit needs {'.'.join(map(str, _LEAST_TORCH))} or newer"
        return Finding("torch", "problem" if needed else "info", text, _INSTALL_TORCH)
    parts = [f"{name} {installed}" for name, package in _WITH_TORCH if (installed := version_of(package))]
    return Finding("torch", "ok", ", ".join([f"torch {version}", *(parts or ["a build for the CPU"])]))


def _gpus() -> Finding:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    names: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        names = done.stdout.strip().splitlines()
    if not names:
        return Finding("gpus", "info", "no GPU: ranks run on the CPU")
    name, memory, driver = (part.strip() for part in (names[0] + ",,").split(",")[:3])
    return Finding("gpus", "ok", f"{things(len(names), 'GPU')}: {name}, {memory}, driver {driver}")


def _docker() -> Finding:
    docker.check()
    return Finding("docker", "ok", "docker: the engine answers")


def _compiler() -> Finding:
    path = compilers.find_compiler()
    if path is None:
        return Finding("compiler", "info", "no C++ compiler (kernels of the host are compiled where there is one)")
    return Finding("compiler", "ok", f"C++ compiler: {path}")


def _shared_memory(folder: Path) -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return
    text = f"{folder}: {amount(usage.free)} free of {amount(usage.total)}"
    if usage.total > _SMALL_SHARED_BYTES:
        yield Finding("shared memory", "ok", text)
        return
    hint = "workers of a DataLoader and NCCL need more; start the container with `--shm-size 8g`"
    yield Finding("shared memory", "info", text, hint)


def _memory() -> Iterator[Finding]:
    try:
        sizes = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8")))
        free, total = int(sizes["MemAvailable"]) * 1024, int(sizes["MemTotal"]) * 1024
    except (OSError, KeyError):
        return
    yield Finding("memory", "ok", f"memory: {amount(free)} free of {amount(total)}, {os.cpu_count()} processors")


def version_of(package: str) -> str | None:
    """Return the version of a package that is installed here; None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
