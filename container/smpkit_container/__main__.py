"""The program of the training image: `python -m smpkit_container [train] [-- script arguments...]`.

On Slurm, Kubernetes and AWS Batch variables say which host of its job this is (`smpkit_container.scheduled`).

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

from smpkit.config import scheduled as names
from smpkit.config.words import plain
from smpkit.errors import SmpkitError
from smpkit.observe.runs import RUN_DIR
from smpkit_container.aws import secret_variables
from smpkit_container.console import Console
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
from smpkit_container.scheduled import described_hosts, lay_out, leave_message
from smpkit_container.source import fetch_source, install_requirements

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl

_OURS = (
    "SMPKIT_BASE_DIR",
    "SMPKIT_DIE_WITH_PARENT",
    "SMPKIT_HYPERPARAMETERS",
    "SMPKIT_LOG_TIMES",
    "SMPKIT_SHOW_LOG",
    *names.OF_THE_LAUNCHER,
)
"""Variables for this process alone: a launcher that the script starts must not inherit them."""


def main(arguments: Sequence[str], environ: Mapping[str, str], *, stopped_code: int = 0) -> int:
    """Run the job that the platform describes; return the exit code, `stopped_code` as in `launch`."""
    before, extra = _split(arguments)
    if before not in ([], ["train"]):
        return _become(arguments)
    if names.is_scheduled(environ):
        return _train_scheduled(environ, extra)
    return _train(environ, extra, stopped_code=stopped_code)


def _train_scheduled(environ: Mapping[str, str], extra: Sequence[str]) -> int:
    """Run the part of one host among those that a scheduler has started."""
    base = base_folder(environ)
    try:
        environ = lay_out(environ)
        base = base_folder(environ)
    except (SmpkitError, OSError) as error:
        code = _refuse(error, base)
    else:
        # `smpkit stop` may have run before this launcher started.
        stopped = bool(environ.get(names.STOP_FILE)) and Path(environ[names.STOP_FILE]).exists()
        code = names.STOPPED
        if not stopped:
            code = _train(environ, extra, stopped_code=names.STOPPED, lost_code=names.LOST)
    leave_message(base, environ)
    return code


def _train(environ: Mapping[str, str], extra: Sequence[str], *, stopped_code: int = 0, lost_code: int = 1) -> int:
    """Run the job described below the base folder. This is the program's only error boundary."""
    if environ.get("SMPKIT_DIE_WITH_PARENT") == "1":  # a local run must not go on when its command line is killed
        _die_with_parent()
    base = base_folder(environ)
    more = json.loads(environ.get("SMPKIT_HYPERPARAMETERS") or "{}")  # of SDK v3's driver
    console = Console.of_process(environ)
    scheduled = names.is_scheduled(environ)
    try:
        hosts = described_hosts(environ)
        environ = {name: value for name, value in environ.items() if name not in _OURS}
        if base == DEFAULT_BASE or scheduled:  # else `smpkit run` chooses
            environ = {RUN_DIR: str(Folders(base).run), **environ}
        environment = Environment.read(
            base,
            environ,
            num_gpus=count_gpus(environ),
            num_cpus=count_cpus(),
            has_efa=find_efa(),
            more=more,
            hosts=hosts,
        )
        if base == DEFAULT_BASE or (scheduled and environment.code == environment.folders.code):  # else used in place
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
