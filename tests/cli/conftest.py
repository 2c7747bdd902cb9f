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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the seed job, made the current one."""
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Smpkit = Callable[..., Result]


@pytest.fixture
def smpkit(monkeypatch: pytest.MonkeyPatch) -> Smpkit:
    """Run the command line in this process, and what needs torch in a fork that has it already."""
    forked = SimpleNamespace(run=run_module, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(_with_torch, "subprocess", forked)

    def run(*arguments: str, **extra: Any) -> Result:
        return CliRunner().invoke(cli, list(arguments), **extra)

    return run


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as users do."""
    smpkit = Path(sys.executable).with_name("smpkit")
    variables = {**os.environ, **environment}
    command = [str(smpkit), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=variables, check=False)
