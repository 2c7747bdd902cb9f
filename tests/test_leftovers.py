"""A failing test leaves no process behind, and the suite runs where SIGINT is ignored at its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILING = """
import subprocess

def test_that_fails(tmp_path):
    child = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
    (tmp_path.parent / "pid").write_text(str(child.pid))
    assert False
"""
INTERRUPTED = """
import signal, subprocess, sys

def test_that_interrupts():
    script = "import time; print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == -signal.SIGINT
"""


def run_pytest(folder: Path, test: str, before: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "test_inner.py").write_text(test)
    command = f"{before} exec {sys.executable} -m pytest -q -p tests.conftest -p no:cacheprovider --basetemp {folder}/t"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        ["sh", "-c", f"{command} {folder}/test_inner.py"],
        cwd=folder,
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_processes_of_a_failing_test_are_killed(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, FAILING)
    assert done.returncode == 1, done.stdout
    pid = int((tmp_path / "t" / "pid").read_text())
    state = Path(f"/proc/{pid}/status")
    assert not state.exists() or "zombie" in state.read_text()


def test_children_can_be_interrupted_where_sigint_is_ignored(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, INTERRUPTED, before="trap '' INT;")
    assert done.returncode == 0, done.stdout
