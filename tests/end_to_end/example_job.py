"""Run the job of an example, or a script of it, in processes that have torch and transformers already."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from smpkit.config.load import load_job
from smpkit.drop_in import DROP_IN_PATH, after_import
from smpkit_container.variables import script_arguments
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def launched(job: Path, small: Mapping[str, Any], *more: str) -> str:
    """Run a job with `smpkit run` and some hyperparameters of its own; return what rank 0 said."""
    sets = [part for key, value in small.items() for part in ("--set", f"hyperparameters.{key}={value}")]
    command = [sys.executable, "-m", "smpkit", "run", str(job), *sets, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("[rank 0] ", "")


def on_forked_ranks(job: Path, small: Mapping[str, Any]) -> str:
    """Run the job's script, with the job's parameters, on as many forked ranks; return what rank 0 said."""
    config = load_job(job).config
    written = yaml.safe_load(job.read_text(encoding="utf-8"))
    given = json.dumps(written["distribution"]["smdistributed"]["modelparallel"]["parameters"])
    arguments = script_arguments({**config.hyperparameters, **small}, ())
    ranks = config.compute.instance_count * (config.distribution.processes_per_host or 1)
    return str(run_ranks(_as_script, ranks, str(job.with_name(config.entry_point)), arguments, given)[0])


def run_file(path: Path, *arguments: str) -> str:
    """Run a script of an example as `python` would, forked; return what it said."""
    return str(run_ranks(_as_script, 1, str(path), arguments, None)[0])


def _as_script(path: str, arguments: Sequence[str], parameters: str | None) -> str:
    if parameters is not None:
        os.environ["SM_HP_MP_PARAMETERS"] = parameters
        os.environ["SM_FRAMEWORK_PARAMS"] = '{"sagemaker_mpi_enabled": true}'
        sys.path.append(str(DROP_IN_PATH))  # for scripts that ask for it, as the launcher does
        after_import.install()
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(path, run_name="__main__")
    return said.getvalue()
