"""The program of the training image: `python -m smpkit_container [train] [-- script arguments...]`.

On Slurm, `python -m smpkit_container slurm RUN` is one node's part of the run in that folder; on Kubernetes and AWS
Batch, `python -m smpkit_container host SPEC` is that of one host.

Any other arguments are a command to run instead, so that `docker run IMAGE bash` does what people expect.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from smpkit.config.words import plain
from smpkit.errors import SmpkitError
from smpkit.observe.runs import RUN_DIR
from smpkit_container import pod, slurm
from smpkit_container.console import Console
from smpkit_container.described import LOST, STOPPED
from smpkit_container.environment import (
    DEFAULT_BASE,
    Environment,
    Folders,
    base_folder,
    count_cpus,
    count_gpus,
    find_efa,
)
from smpkit_container.failure import write_failure
from smpkit_container.launch import launch
from smpkit_container.secret_entries import secret_variables
from smpkit_container.source import fetch_source, install_requirements

__all__ = ["main"]

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl

_OURS = ("SMPKIT_BASE_DIR", "SMPKIT_DIE_WITH_PARENT", "SMPKIT_HYPERPARAMETERS", "SMPKIT_LOG_TIMES", "SMPKIT_SHOW_LOG")
"""Variables for this process alone: a launcher that the script starts must not inherit them."""


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the job that the platform describes; return the exit code."""
    before, extra = _split(arguments)
    if before[:1] == ["slurm"] and len(before) == 2:
        return _on_slurm(Path(before[1]), extra, environ)
    if before[:1] == ["host"] and len(before) == 2:
        return _as_host(before[1], extra, environ)
    if before not in ([], ["train"]):
        return _become(arguments)
    base = base_folder(environ)
    if base == DEFAULT_BASE:
        return _train(_with_run_folder(base, environ), extra, fetch=True)
    return _train(environ, extra, fetch=False)  # `smpkit run`, which chooses the folder of the run


def _on_slurm(run: Path, extra: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one node's part of a run on Slurm; return the exit code."""
    try:
        base, variables = slurm.lay_out(run, environ)
        times = slurm.open_log(run, environ)
    except (SmpkitError, OSError) as error:
        return _refuse(error)
    ours = {
        "SMPKIT_BASE_DIR": str(base),
        "SMPKIT_DIE_WITH_PARENT": "1",
        "SMPKIT_LOG_TIMES": times,
        "TRAINING_JOB_NAME": run.name,
    }
    code = STOPPED
    if not (run / "stopped").exists():  # `smpkit stop` may have run before this launcher started
        environ = _with_run_folder(base, {**environ, **variables})
        code = _train({**environ, **ours}, extra, fetch=False, stopped_code=STOPPED)
    slurm.note_end(run, environ, code)
    return code


def _as_host(place: str, extra: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one host's part of a job on Kubernetes or AWS Batch; return the exit code."""
    base = base_folder(environ)
    try:
        variables = pod.lay_out(place, base, environ)
    except (SmpkitError, OSError) as error:
        code = _refuse(error, base)
    else:
        theirs = _with_run_folder(base, {**environ, **variables})
        code = _train(theirs, extra, fetch=True, stopped_code=STOPPED, lost_code=LOST)
    pod.leave_message(base, environ)
    return code


def _with_run_folder(base: Path, environ: Mapping[str, str]) -> dict[str, str]:
    return {RUN_DIR: str(Folders(base).run), **environ}


def _train(
    environ: Mapping[str, str], extra: Sequence[str], *, fetch: bool, stopped_code: int = 0, lost_code: int = 1
) -> int:
    """Run the job described below the base folder. This is the program's only error boundary.

    Args:
        fetch: unpack the sources and install what they require; a local run uses both in place.
        stopped_code: the exit code if all ranks ended well because they were asked to.
        lost_code: the exit code if the ranks ended because another host was lost.
    """
    if environ.get("SMPKIT_DIE_WITH_PARENT") == "1":  # a local run must not go on when its command line is killed
        _die_with_parent()
    base = base_folder(environ)
    more = json.loads(environ.get("SMPKIT_HYPERPARAMETERS") or "{}")  # of SDK v3's driver
    console = Console.of_process(environ)
    environ = {name: value for name, value in environ.items() if name not in _OURS}
    try:
        environment = Environment.read(
            base, environ, num_gpus=count_gpus(environ), num_cpus=count_cpus(), has_efa=find_efa(), more=more
        )
        if fetch:
            fetch_source(environment)
            install_requirements(environment.code)
        environ = {**environ, **secret_variables(environment)}
        return launch(environment, environ, console, extra, stopped_code=stopped_code, lost_code=lost_code)
    except KeyboardInterrupt:  # before the launcher handles it
        sys.stderr.write("Stopped before the ranks were started\n")
        return 130
    except (SmpkitError, OSError) as error:
        return _refuse(error, base)
    except Exception as error:
        reason = f"a bug in smpkit: {type(error).__name__}: {error}"
        sys.stderr.write(f"error: {plain(reason)}; details: {Folders(base).failure}\n")
        _leave_reason(base, f"{reason}\n{traceback.format_exc()[-800:]}")
        return 3


def _refuse(error: SmpkitError | OSError, base: Path | None = None) -> int:
    """Say why the job cannot be started, below `base`, too; return the exit code."""
    sys.stderr.write(f"error: {plain(str(error))}\n")
    if base is not None:
        _leave_reason(base, str(error))
    return error.exit_code if isinstance(error, SmpkitError) else 1


def _die_with_parent() -> None:
    """Ask Linux to send this process SIGTERM when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def _become(command: Sequence[str]) -> int:
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - the command of whoever started the container
    except OSError as error:
        sys.stderr.write(f"error: `{command[0]}` cannot be run: {error.strerror}\n")
        sys.stderr.write("hint: `train` runs the job described below /opt/ml\n")
        return 127


def _leave_reason(base: Path, reason: str) -> None:
    try:
        write_failure(Folders(base).failure, reason)
    except OSError as error:
        sys.stderr.write(f"the failure file could not be written: {error}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
