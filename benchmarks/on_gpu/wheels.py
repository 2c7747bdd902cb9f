"""Packages that a machine without network lacks: fetched as wheels where there is one, installed from there."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from benchmarks.on_gpu.parts import ROOT

__all__ = ["fetch", "install"]

_WANTED: Final = ("pydantic",)
"""What tests and benchmarks import and a machine with torch, transformers, accelerate, hypothesis and pytest (with its
timeout and xdist) lacks; what this needs itself comes along."""
_PYTHON: Final = "3.12"
_PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_MOST_BYTES: Final = 60 << 20


def fetch(folder: Path) -> list[str]:
    """Fill a folder with wheels for CPython 3.12 on x86-64, and return their names; this takes a network.

    Raises:
        RuntimeError: they cannot be had, or are too large to travel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    constraints = (ROOT / "scripts/constraints.txt").read_text(encoding="utf-8")
    known = dict(re.findall(r"^([\w.-]+)(==[\w.]+)\s*$", constraints, flags=re.MULTILINE))
    waiting = [name + known.get(name, "") for name in _WANTED]
    done: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = _name_of(requirement)
        if name not in done:
            done.add(name)
            waiting += _needs_of(_download(requirement, folder))
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    if size > _MOST_BYTES:
        raise RuntimeError(f"the wheels take {size >> 20} MiB, more than {_MOST_BYTES >> 20}")
    return sorted(path.name for path in folder.glob("*.whl"))


def install(folder: Path, site: Path) -> None:
    """Install all wheels of a folder into another; raise RuntimeError if that fails."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--target", str(site))
    _pip("install", *options, *wheels)


def _download(requirement: str, folder: Path) -> Path:
    before = set(folder.glob("*.whl"))
    platforms = [f"--platform={each}" for each in _PLATFORMS]
    options = ("--no-deps", "--only-binary=:all:", f"--python-version={_PYTHON}", "--implementation=cp", *platforms)
    _pip("download", *options, "--quiet", "--dest", str(folder), requirement)
    new = set(folder.glob("*.whl")) - before
    if len(new) != 1:
        raise RuntimeError(f"pip brought {len(new)} wheels for {requirement}")
    return new.pop()


def _needs_of(wheel: Path) -> list[str]:
    """Return what a wheel requires, without extras and without what other systems need."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needs = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [need for need in needs if ";" not in need]


def _name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return found.group().lower().replace("_", "-")


def _pip(command: str, *arguments: str) -> None:
    start = [sys.executable, "-m", "pip", command, "--disable-pip-version-check"]
    done = subprocess.run([*start, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pip {command} failed: {done.stderr.strip() or done.stdout.strip()}")
