"""Our modules run as `python -m` runs them, whatever files stand in the current folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smpkit.modules import module_command


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_modules_are_not_looked_for_in_the_current_folder(version: tuple[int, int], tmp_path: Path) -> None:
    if version > sys.version_info[:2]:
        pytest.skip("Python has `-P` from 3.11 on")
    here, library = tmp_path / "here", tmp_path / "library"
    here.mkdir()
    library.mkdir()
    (here / "json.py").write_text("raise ImportError('a file of the user stands in the way')\n")
    shown = library / "shown.py"
    shown.write_text("import json, sys\nprint(json.dumps([__name__, __spec__.name, sys.argv, sys.path[0]]))\n")
    command = [*module_command("shown", version), "--lr", "1"]
    environ = {**os.environ, "PYTHONPATH": str(library)}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["__main__", "shown", [str(shown), "--lr", "1"], str(library)]
