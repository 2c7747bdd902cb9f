"""Pack the smpkit that is running into a wheel, so that the image holds the very same code."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["pack_wheel"]

_PACKAGES = ("smpkit", "smpkit_container", "smpkit_estimator")
_TIME = (2020, 1, 1, 0, 0, 0)  # equal code gives equal bytes, and so Docker's cache is used


def pack_wheel(folder: Path) -> Path:
    """Write `smpkit-<version>-py3-none-any.whl` into `folder` and return its path.

    Source: the wheel format, https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    distribution = importlib.metadata.distribution("smpkit")
    version = distribution.version
    info = f"smpkit-{version}.dist-info"
    metadata = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    files = {**dict(_sources()), f"{info}/METADATA": metadata.encode()}
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: smpkit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nsmpkit = smpkit.__main__:main\n"
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()
    path = folder / f"smpkit-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name, _TIME), data, zipfile.ZIP_DEFLATED)
    return path


def _sources() -> Iterator[tuple[str, bytes]]:
    for name in _PACKAGES:
        module = importlib.import_module(name)
        assert module.__file__ is not None
        folder = Path(module.__file__).parent
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
