"""What the tests of the command line share: a folder with a job, and running `smpkit` inside or as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from smpkit.cli import _with_torch
from smpkit.cli.main import cli
from tests.forked import run_module

JOB = """\
entry_point: train.py
compute:
  instance_count: 2
distribution:
  smdistributed:
    modelparallel:
      enabled: true
      parameters:
        microbatches: 4
        pipeline_parallel_degree: 2
        placement_strategy: cluster
        tensor_parallel_degree: 2
        ddp: true
        offload_activations: true
        activation_loading_horizon: 4
  mpi:
    enabled: true
    processes_per_host: 8
    custom_mpi_options: "--mca btl_vader_single_copy_mechanism none "
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, made the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(here: Path) -> Path:
    """The current folder, with the seed job."""
    (here / "train.py").touch()
    (here / "job.yaml").write_text(JOB)
    return here


Smpkit = Callable[..., Result]


@pytest.fixture
def smpkit(monkeypatch: pytest.MonkeyPatch) -> Smpkit:
    """Run the command line in this process, and what needs torch in a fork that has it already.

    With `code`, the exit code must be that.
    """
    forked = SimpleNamespace(run=run_module, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(_with_torch, "subprocess", forked)

    def run(*arguments: str, code: int | None = None, **extra: Any) -> Result:
        done = CliRunner().invoke(cli, list(arguments), **extra)
        assert code in (None, done.exit_code), f"smpkit {arguments}: {done.exit_code}\n{done.output}"
        return done

    return run


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as users do."""
    smpkit = Path(sys.executable).with_name("smpkit")
    variables = {**os.environ, **environment}
    command = [str(smpkit), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=variables, check=False)
