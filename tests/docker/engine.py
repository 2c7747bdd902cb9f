"""A Docker engine and an image for the tests: the machine's own engine, or one that is started beside it."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BASE = "smpkit-test-base:bookworm"


def why_not() -> str | None:
    """Return why there can be no engine here; None if there can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    if _answers():
        return None
    if shutil.which("dockerd") is None:
        return "no Docker engine is running, and dockerd is not installed"
    return None if os.geteuid() == 0 else "no Docker engine is running, and only root can start one"


@contextmanager
def running_engine() -> Iterator[None]:
    """Use the engine that is there, or start one with a socket and data of its own, and end it afterwards.

    Its folder is not one of pytest's: an engine leaves mounts behind (the network's, an image's), and pytest, when it
    later removes the folders of earlier sessions, would fail on them.
    """
    if _answers():
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="smpkit-engine-"))
    try:
        with _started(folder):
            yield
    finally:
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([place for place in mounted if place.startswith(f"{folder}/")]):
            subprocess.run(["umount", "--lazy", place], check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(folder: Path) -> Iterator[None]:
    socket = folder / "docker.sock"
    command = ["dockerd", "--host", f"unix://{socket}", "--data-root", str(folder / "data")]
    command += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    os.environ["DOCKER_HOST"] = f"unix://{socket}"
    try:
        deadline = time.monotonic() + 60
        while not _answers():
            assert daemon.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "dockerd did not answer within 60 s"
            time.sleep(0.2)
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(timeout=60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(timeout=60)
        del os.environ["DOCKER_HOST"]


def base_image(folder: Path) -> str:
    """Return the name of a plain Debian; images cannot be pulled everywhere, so it may have to be made of packages."""
    given = os.environ.get("SMPKIT_TEST_BASE_IMAGE", _BASE)
    if subprocess.run(["docker", "image", "inspect", given], capture_output=True, check=False).returncode == 0:
        return given
    root = folder / "root"
    command = ["debootstrap", "--variant=minbase", "--include=python3,ca-certificates", "bookworm", str(root)]
    subprocess.run(command, check=True, capture_output=True, timeout=1200)
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run(["docker", "import", "-", _BASE], stdin=packed.stdout, check=True, capture_output=True)
    shutil.rmtree(root, ignore_errors=True)
    return _BASE


def image_options() -> list[str]:
    """Return options for `smpkit image` that let it be built where this machine's pip works."""
    options = ["--build-network", "host"]
    authority = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    if authority and Path(authority).is_file():
        options += ["--ca", authority]
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    ).stdout.split()
    folder = next((Path(word) for word in configured if Path(word).is_dir()), None)
    wheel = next(iter(folder.glob("torch-*.whl")), None) if folder else None
    if folder is not None and wheel is not None:
        options += ["--wheels", str(folder), "--torch", f"torch=={wheel.name.split('-')[1]}"]
    return options


def _answers() -> bool:
    done = subprocess.run(["docker", "version"], capture_output=True, timeout=30, check=False)
    return done.returncode == 0
