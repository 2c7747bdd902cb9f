"""Run a module as `subprocess.run([*module_command(...), ...])` does, in a process that has torch already."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smpkit.modules import module_command
from tests.ranks import FORKSERVER

__all__ = ["run_module"]


def run_module(command: Sequence[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
    """Run what `module_command` made, and arguments, here, forked; what Python itself is told means nothing.

    Raises subprocess.TimeoutExpired.
    """
    words = command[len(module_command("")) - 1 :]
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        process = FORKSERVER.Process(target=_main, args=(words, str(Path.cwd()), str(out), str(err)), daemon=True)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        texts = [path.read_text(encoding="utf-8") for path in (out, err)]
    return subprocess.CompletedProcess(command, process.exitcode, *texts)


def _main(words: Sequence[str], folder: str, out: str, err: str) -> None:
    os.chdir(folder)
    for number, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
