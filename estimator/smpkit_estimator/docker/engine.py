"""Talk to the Docker engine through its command line, which every user of Docker has set up already."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from smpkit.errors import LaunchError

__all__ = ["check", "docker", "quietly"]

_SECONDS = 120.0


def check() -> None:
    """Find out whether there is an engine before anything is made.

    Raises:
        LaunchError: Docker is not installed, or its engine does not answer.
    """
    if shutil.which("docker") is None:
        raise LaunchError("`docker` was not found", hint="install Docker, or run the job without `--docker`")
    docker("version", "--format", "{{.Server.Version}}", seconds=30, why="the Docker engine does not answer")


def docker(*arguments: str, seconds: float = _SECONDS, why: str = "") -> str:
    """Run one docker command and return what it printed.

    Raises:
        LaunchError: it failed or took longer than `seconds`; `why` comes before what it said.
    """
    try:
        done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`docker {arguments[0]}` did not end within {seconds:g} s") from None
    except OSError as error:
        raise LaunchError(f"`docker` could not be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LaunchError(
            f"{why or f'`docker {arguments[0]}` failed'}: {said.splitlines()[-1] if said else 'silently'}"
        )
    return done.stdout.strip()


def quietly(commands: Sequence[Sequence[str]]) -> None:
    """Run commands whose failure changes nothing: things to be removed may be gone already."""
    for arguments in commands:
        subprocess.run(["docker", *arguments], capture_output=True, timeout=_SECONDS, check=False)
