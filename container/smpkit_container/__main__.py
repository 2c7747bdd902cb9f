"""The program of the training image: `python -m smpkit_container [train] [-- script arguments...]`.

On Slurm, Kubernetes and AWS Batch variables say which host of its job this is. `smpkit submit` leaves the job's files
where every host finds them: in the folder of a run on Slurm, mounted on Kubernetes, in S3 for AWS Batch.

Any other arguments are a command to run instead, so that `docker run IMAGE bash` does what people expect.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def _stop_early(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """End at SIGTERM as a stopped job does, until the launcher handles it: see `names.STOPPED`."""
    os.write(2, b"Stopped before the ranks were started\n")
    raise SystemExit(143)


if __name__ == "__main__":
    # Before the imports below, which take a second: the first process of a container ignores SIGTERM without a handler.
    signal.signal(signal.SIGTERM, _stop_early)

import json
import subprocess
import sys
import tarfile
import tempfile
import traceback
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from smpkit.config import scheduled as names
from smpkit.config.wire import HOMOGENEOUS, MAX_UNPACKED_BYTES, SUBMIT_DIRECTORY
from smpkit.config.words import plain
from smpkit.errors import LaunchError, SmpkitError
from smpkit.observe.runs import RUN_DIR
from smpkit_container.aws import fetch, put, secret_variables
from smpkit_container.console import Console
from smpkit_container.environment import (
    DEFAULT_BASE,
    Environment,
    Folders,
    base_folder,
    count_cpus,
    count_gpus,
)
from smpkit_container.failure import write_failure
from smpkit_container.launch import launch

_OURS = (
    "SMPKIT_BASE_DIR",
    "SMPKIT_HYPERPARAMETERS",
    "SMPKIT_LOG_TIMES",
    "SMPKIT_SHOW_LOG",
    *names.OF_THE_LAUNCHER,
)
"""Variables for this process alone: a launcher that the script starts must not inherit them."""


def main(arguments: Sequence[str], environ: Mapping[str, str], *, stopped_code: int = 0) -> int:
    """Run the job that the platform describes; return the exit code, `stopped_code` as in `launch`."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    extra = arguments[cut + 1 :]
    if [*arguments[:cut]] not in ([], ["train"]):
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
        write_failure(Folders(base).failure, f"{reason}\n{traceback.format_exc()[-800:]}")
        return 3


def _refuse(error: SmpkitError | OSError, base: Path) -> int:
    """Say why the job cannot be started, below `base`, too; return the exit code."""
    sys.stderr.write(f"error: {plain(str(error))}\n")
    write_failure(Folders(base).failure, str(error))
    return error.exit_code if isinstance(error, SmpkitError) else 1


def _become(command: Sequence[str]) -> int:
    try:
        os.execvp(command[0], list(command))  # noqa: S606 - the command of whoever started the container
    except OSError as error:
        sys.stderr.write(f"error: `{command[0]}` cannot be run: {error.strerror}\n")
        sys.stderr.write("hint: `train` runs the job described below /opt/ml\n")
        return 127


# ---- a host of a job that a scheduler starts: from its variables to what the launcher reads on SageMaker -------------

_INDEX = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_NODE_INDEX")
"""Which host this is, as Slurm, Kubernetes and AWS Batch tell it."""
_FIRST = (names.FIRST_HOST, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
_CONFIG = ("hyperparameters.json", "inputdataconfig.json")


def described_hosts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what `resourceconfig.json` would say; empty if no variable tells of hosts.

    Beside the file's own keys there are `first_address`, where the first host is reached, and `port`.
    """
    hosts = environ.get(names.HOSTS, "").split()
    if not hosts:
        return {}
    index = next((environ[name] for name in _INDEX if environ.get(name)), "")
    if not index.isdecimal() or int(index) >= len(hosts):
        hint = "start this with `srun`, in a pod of an Indexed Job, or on a node of AWS Batch"
        raise LaunchError(f"none of {', '.join(_INDEX)} is the number of one of {len(hosts)} hosts", hint=hint)
    port = environ.get(names.PORT) or ""
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise LaunchError(f"{names.PORT} is {port!r}", hint="it is the number of a TCP port, 1 to 65535")
    machine = environ.get(names.MACHINE) or "local"
    group = {"instance_group_name": HOMOGENEOUS, "instance_type": machine, "hosts": hosts}
    return {
        "current_host": hosts[int(index)],
        "current_instance_type": machine,
        "current_group_name": HOMOGENEOUS,
        "hosts": hosts,
        "instance_groups": [group],
        "network_interface_name": environ.get(names.INTERFACE) or "",
        # Batch tells the first host's address to the others only.
        "first_address": next((environ[name] for name in _FIRST if environ.get(name)), "localhost"),
        **({"port": int(port)} if port else {}),
    }


def lay_out(environ: Mapping[str, str]) -> dict[str, str]:
    """Make what the launcher reads below its base folder; return its variables, with those of the job's file."""
    variables = dict(environ)
    if path := environ.get(names.VARIABLES):
        try:
            variables |= {name: str(value) for name, value in json.loads(Path(path).read_bytes()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise LaunchError(f"the job's variables {path} cannot be read: {error}") from None
    host = described_hosts(variables)["current_host"]
    base = Path(variables["SMPKIT_BASE_DIR"].replace("{host}", host))
    (base / "output").mkdir(parents=True, exist_ok=True)
    (base / "output" / "failure").unlink(missing_ok=True)  # of the attempt before
    for part, place in json.loads(variables.get(names.PLACES) or "{}").items():
        _link(base / part, Path(place), is_result=not part.startswith("input"))
    if variables.get(names.CONFIG):
        config = base / "input" / "config"
        config.mkdir(parents=True, exist_ok=True)
        for name in _CONFIG:
            uri = f"{variables[names.CONFIG]}/{name}"
            fetch(uri, config / name, "the description of the job", variables.get("AWS_REGION"))
    return {**variables, "SMPKIT_BASE_DIR": str(base)}


def _link(link: Path, target: Path, *, is_result: bool) -> None:
    """Let a folder below the base lie elsewhere; what the job writes to is made there."""
    if is_result:
        target.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    link.symlink_to(target, target_is_directory=True)


def leave_message(base: Path, environ: Mapping[str, str]) -> None:
    """Leave why the job failed where Kubernetes keeps it, or in S3 under the name of this host."""
    failure, place = base / "output" / "failure", environ.get(names.MESSAGE)
    if not place or not failure.is_file():
        return
    try:
        if place.startswith("s3://"):
            put(failure, f"{place}/{described_hosts(environ)['current_host']}", environ.get("AWS_REGION"))
        else:
            Path(place).write_bytes(failure.read_bytes())
    except (LaunchError, OSError) as error:
        os.write(2, f"the reason could not be left in {place}: {plain(str(error))}\n".encode())


# ---- the job's source code, and what it needs ------------------------------------------------------------------------

_CHUNK_BYTES = 1 << 20
_PIP_SECONDS = 1800


def fetch_source(environment: Environment) -> None:
    """Unpack the submitted archive into `/opt/ml/code`, downloaded if need be, unless there are files already."""
    submitted = str(environment.framework.get(SUBMIT_DIRECTORY) or "")
    code = environment.folders.code
    if code.is_dir() and any(code.iterdir()):
        if submitted.startswith("s3://"):
            os.write(2, f"note: {code} in the image holds files, which are used instead of {submitted}\n".encode())
        return
    if submitted.endswith(".tar.gz") and Path(submitted).is_file():  # a channel brought it, as there is no network
        unpack(Path(submitted), code)
    if not submitted.startswith("s3://"):
        return
    with tempfile.TemporaryDirectory(prefix="smpkit-source-") as folder:
        archive = Path(folder) / "source.tar.gz"
        fetch(submitted, archive, "the source archive", environment.region)
        unpack(archive, code)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar archive into `folder`, files and folders only and never beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            # `_check` is stricter; but Python 3.12 and 3.13 warn where none is chosen, and old 3.10 and 3.11 have none.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            members = tar.getmembers()
            assert tar.fileobj is not None
            while tar.fileobj.read(_CHUNK_BYTES):  # to the checksum, which follows the last member, where tarfile stops
                pass
            for member in members:
                _check(member)
            if sum(member.size for member in members) > MAX_UNPACKED_BYTES:
                raise LaunchError(f"the source archive unpacks to more than {MAX_UNPACKED_BYTES >> 30} GiB")
            for member in members:
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                tar.extract(member, folder, set_attrs=member.isfile())
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise LaunchError(f"the source archive cannot be unpacked: {error}") from error


def install_requirements(code: Path) -> None:
    """Install the `requirements.txt` of the source code, if it has one, as AWS's images do."""
    requirements = code / "requirements.txt"
    if not requirements.is_file():
        return
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-r", str(requirements)]
    os.write(2, f"Installing {requirements}\n".encode())  # it may take minutes
    try:
        done = subprocess.run(command, cwd=code, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`requirements.txt` could not be installed: {error}") from error
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise LaunchError(f"`requirements.txt` could not be installed (pip, exit code {done.returncode}):\n{words}")


def _check(member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise LaunchError(f"the source archive holds `{member.name}`, which leads out of its folder")
    if not (member.isfile() or member.isdir()):
        raise LaunchError(f"the source archive holds `{member.name}`, which is neither a file nor a folder")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
