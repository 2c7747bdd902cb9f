"""Build the training image on any base; the smpkit in it is a wheel of the very code that is running."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from smpkit.errors import LaunchError, UsageError
from smpkit_estimator.docker import docker

DEFAULT_BASE_IMAGE = "python:3.12-slim-bookworm"

_BUILD_SECONDS = 3600
_FILES = ("Dockerfile", "install.sh")
_PACKAGES = ("smpkit", "smpkit_container", "smpkit_estimator")
_WHEEL_TIME = (2020, 1, 1, 0, 0, 0)  # equal code gives equal bytes, and so Docker's cache is used


@dataclass(frozen=True)
class Recipe:
    """What the image is made of."""

    base_image: str = DEFAULT_BASE_IMAGE
    """Any image with apt or dnf; PyTorch, Open MPI and ssh are kept where it has them."""
    torch: str = "torch>=2.11"
    """What pip is asked to install, if the base does not satisfy it."""
    torch_options: str = ""
    """Options of pip for it, such as another index."""
    wheels: Path | None = None
    """A folder of wheels that are preferred over the index."""
    authority: Path | None = None
    """A file of certificates (PEM) that the build must trust, behind a proxy that opens TLS."""
    network: str | None = None
    """Docker's network for the build, such as `host`."""


def build_image(recipe: Recipe, tag: str | None = None) -> str:
    """Build the image, which takes seconds if nothing has changed, and return its name.

    Docker's own output goes to stderr.

    Args:
        tag: default: `smpkit:` with a hash of all that goes into it.
    """
    with tempfile.TemporaryDirectory(prefix="smpkit-image-") as folder:
        context = Path(folder)
        _fill(context, recipe)
        name = tag or f"smpkit:{_fingerprint(context, recipe)}"
        if tag is None and docker("images", "--quiet", name):
            return name
        options = ["--network", recipe.network] if recipe.network else []
        arguments = {
            "BASE_IMAGE": recipe.base_image,
            "TORCH": recipe.torch,
            "TORCH_OPTIONS": recipe.torch_options,
        }
        for key, value in arguments.items():
            options += ["--build-arg", f"{key}={value}"]
        command = ["docker", "build", *options, "--tag", name, str(context)]
        try:
            status = subprocess.run(command, stdout=2, timeout=_BUILD_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            raise LaunchError(f"the image was not built within {_BUILD_SECONDS} s") from None
    if status:
        raise LaunchError(
            f"the image could not be built on {recipe.base_image} (docker build, exit code {status})",
            hint="behind a proxy, name its certificates with `--ca`; without a route, try `--build-network host`",
        )
    return name


def _fill(context: Path, recipe: Recipe) -> None:
    place = context / "container" / "smpkit_container"
    place.mkdir(parents=True)
    for name in _FILES:
        (place / name).write_bytes(resources.files("smpkit_container").joinpath(name).read_bytes())
    shutil.copyfile(place / "Dockerfile", context / "Dockerfile")
    pack_wheel(context)
    wheels = context / "wheels"
    wheels.mkdir()
    if recipe.wheels is not None:
        if not recipe.wheels.is_dir():
            raise UsageError(f"there is no folder of wheels `{recipe.wheels}`")
        for path in sorted(recipe.wheels.glob("*.whl")):
            shutil.copyfile(path, wheels / path.name)
    if recipe.authority is not None:
        if not recipe.authority.is_file():
            raise UsageError(f"there is no file of certificates `{recipe.authority}`")
        (context / "ca").mkdir()
        shutil.copyfile(recipe.authority, context / "ca" / f"{recipe.authority.stem}.crt")


def _fingerprint(context: Path, recipe: Recipe) -> str:
    digest = hashlib.sha256(repr((recipe.base_image, recipe.torch, recipe.torch_options)).encode())
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(context)}\n".encode())
        digest.update(path.read_bytes() if path.stat().st_size < 64 << 20 else str(path.stat().st_size).encode())
    return digest.hexdigest()[:12]


def pack_wheel(folder: Path) -> Path:
    """Write `smpkit-<version>-py3-none-any.whl` into `folder` and return its path.

    Source: the wheel format, https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    distribution = importlib.metadata.distribution("smpkit")
    version = distribution.version
    info = f"smpkit-{version}.dist-info"
    metadata = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    files = {**dict(_package_files()), f"{info}/METADATA": metadata.encode()}
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: smpkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nsmpkit = smpkit.__main__:main\n"
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()
    path = folder / f"smpkit-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _WHEEL_TIME), data, zipfile.ZIP_DEFLATED)
    return path


def _package_files() -> Iterator[tuple[str, bytes]]:
    for name in _PACKAGES:
        module = importlib.import_module(name)
        assert module.__file__ is not None
        folder = Path(module.__file__).parent
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
