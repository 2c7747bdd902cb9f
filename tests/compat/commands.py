"""Run scripts as a user of SMP v1 would: with `smdistributed` found through `smpkit compat`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smpkit.drop_in import DROP_IN_PATH, after_import
from tests.ranks import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"


def run_compat(
    *command: str,
    parameters: Mapping[str, Any] = MappingProxyType({}),
    env: Mapping[str, str] = MappingProxyType({}),
    timeout: float = 120,
) -> str:
    """Run a command through `smpkit compat` and return its output; a failure shows all of it."""
    words = [sys.executable, "-m", "smpkit", "compat", "--parameters", json.dumps(dict(parameters)), "--", *command]
    env = {**_environment(), **env}
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


def run_script(script: str, *arguments: str, ranks: int, parameters: Mapping[str, Any]) -> None:
    """Run one of `scripts/` with torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher = [sys.executable, *torchrun, "--nproc-per-node", str(ranks)]
    run_compat(*launcher, str(SCRIPTS / script), *arguments, parameters=parameters, timeout=170)


def run_on_ranks(script: str, *arguments: str, ranks: int, parameters: Mapping[str, Any]) -> None:
    """Run one of `scripts/` on ranks that have torch already: as `run_script` does, in a quarter of the time."""
    run_ranks(_as_main, ranks, str(SCRIPTS / script), arguments, json.dumps(dict(parameters)), timeout=150)


def _as_main(script: str, arguments: Sequence[str], parameters: str) -> None:
    sys.path.append(str(DROP_IN_PATH))
    after_import.install()  # before transformers imports smdistributed, as `smpkit compat` does
    os.environ["SM_HP_MP_PARAMETERS"] = parameters
    os.environ["SM_FRAMEWORK_PARAMS"] = '{"sagemaker_mpi_enabled": true}'  # as `smpkit compat` does
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "SMP_", "SMPKIT_"))}
    return {**kept, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def python_path(*first: Path) -> str:
    """Return the value of PYTHONPATH with which a process finds what this one does, and some folders first."""
    paths = [*first, *[Path(folder).absolute() for folder in sys.path if folder]]
    return os.pathsep.join(str(path) for path in paths if path.is_dir())
