"""The simulated device is compiled against torch's own headers, so each supported torch is tried."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from tests.simulated import needs_sim

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["2.11.*", "2.12.*", ">=2.13"])
def test_it_works_with(version: str, tmp_path: Path) -> None:
    needs_sim()
    wanted = f"torch=={version}" if version[0].isdigit() else f"torch{version}"
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with tempfile.TemporaryDirectory(dir=tmp_path) as installed:  # 5 GB, which pytest would keep
        venv.create(installed, with_pip=True)
        python = f"{installed}/bin/python"
        packages = [wanted, "numpy", "pydantic"]
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True, capture_output=True, timeout=900)
        command = [python, "-m", "tests.device.every_version", str(tmp_path / "meeting")]
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr[-5000:]
    sys.stdout.write(done.stdout)
