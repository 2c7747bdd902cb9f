"""Bring the job's source code into place: unpack the archive that was submitted, install what it says it needs."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

from smpkit.config.wire import MAX_UNPACKED_BYTES
from smpkit.errors import LaunchError
from smpkit_container.aws import fetch
from smpkit_container.environment import Environment

_CHUNK_BYTES = 1 << 20
_PIP_SECONDS = 1800


def fetch_source(environment: Environment) -> None:
    """Unpack the submitted archive into `/opt/ml/code`, downloaded if need be, unless there are files already."""
    submitted = str(environment.framework.get("sagemaker_submit_directory") or "")
    code = environment.folders.code
    if code.is_dir() and any(code.iterdir()):
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
            _read_to_the_end(tar)
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


def _read_to_the_end(tar: tarfile.TarFile) -> None:
    """Read to the end of the archive: the checksum follows the last member, where `tarfile` stops."""
    assert tar.fileobj is not None
    while tar.fileobj.read(_CHUNK_BYTES):
        pass
