"""Our modules run as `python -m` runs them, whatever files stand in the current folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from smpkit.modules import module_command


def test_modules_are_not_looked_for_in_the_current_folder(tmp_path: Path) -> None:
    here, library = tmp_path / "here", tmp_path / "library"
    here.mkdir()
    library.mkdir()
    (here / "json.py").write_text("raise ImportError('a file of the user stands in the way')\n")
    shown = library / "shown.py"
    shown.write_text("import json, sys\nprint(json.dumps([__name__, __spec__.name, sys.argv, sys.path[0]]))\n")
    command = [*module_command("shown"), "--lr", "1"]
    environ = {**os.environ, "PYTHONPATH": str(library)}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["__main__", "shown", [str(shown), "--lr", "1"], str(library)]
