"""`scripts/gpu --dry-run` starts what it would run on a GPU, and leaves a folder of results."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.on_gpu.parts import ROOT
from benchmarks.on_gpu.record import Record


@pytest.mark.slow
def test_a_dry_run_starts_parts_and_leaves_a_folder(tmp_path: Path) -> None:
    """A part of tests, whose files must be importable. CI runs the dry run of all parts."""
    folder = tmp_path / "results"
    options = ["--dry-run", "--only", "engine", "--out", str(folder)]
    done = subprocess.run(
        [ROOT / "scripts/gpu", *options], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [engine] = Record.read(folder).outcomes.values()
    assert engine.state == "passed"
    assert engine.tests, "no test was collected"
    assert "torch 2." in (folder / "summary.md").read_text()
