"""Run a module or a script as `subprocess` does, in a process that has torch already: it saves three seconds of CPU."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from smpkit.modules import module_command
from smpkit.torch.launch import FORKSERVER
from tests.ranks import start_server


def run_module(command: Sequence[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
    """Run what `module_command` made, and arguments, here, forked; what Python itself is told means nothing.

    Raises subprocess.TimeoutExpired.
    """
    start_server()
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


class Script:
    """What `subprocess.Popen([sys.executable, path, *words])` is, with pipes, forked from the server of ranks.

    Uncaught exceptions, `sys.exit`, exit handlers and signals are as in a process that was started: what it imports is
    there already. The last moments of an interpreter, after its exit handlers, are not.
    """

    def __init__(self, path: Path, *words: str, env: Mapping[str, str], reads: bool = False) -> None:
        start_server()
        pipes = [FORKSERVER.Pipe(duplex=False) for _ in range(3)]
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = pipes
        arguments = ((str(path), *words), dict(env), their_in if reads else None, their_out, their_err)
        self._process = FORKSERVER.Process(target=_script_main, args=arguments, daemon=True)
        self._process.start()
        self._texts: tuple[str, str] | None = None
        for each in (their_in, their_out, their_err):
            each.close()
        self.stdin = _file_of(our_in, "w")
        self.stdout, self.stderr = (_file_of(each, "r") for each in (our_out, our_err))

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Raises subprocess.TimeoutExpired."""
        if self._texts is None:
            with self.stdin, self.stdout, self.stderr, ThreadPoolExecutor(2) as pool:
                with contextlib.suppress(BrokenPipeError):
                    self.stdin.write(text or "")
                    self.stdin.close()
                read = [pool.submit(each.read) for each in (self.stdout, self.stderr)]
                try:
                    self.wait(timeout)
                except subprocess.TimeoutExpired:
                    self.kill()
                    raise
                self._texts = read[0].result(), read[1].result()
        return self._texts

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a forked script", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _file_of(connection: Connection, mode: str) -> TextIO:
    file = os.fdopen(os.dup(connection.fileno()), mode, encoding="utf-8")
    connection.close()
    return file  # type: ignore[return-value]


def _script_main(
    words: Sequence[str], env: Mapping[str, str], stdin: Connection | None, stdout: Connection, stderr: Connection
) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number, connection in enumerate((stdin, stdout, stderr)):
        if connection is not None:
            os.dup2(connection.fileno(), number)
            connection.close()
    sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))  # noqa: SIM115
    path = words[0]
    sys.argv, sys.path[:0] = list(words), [str(Path(path).parent), *env.get("PYTHONPATH", "").split(os.pathsep)]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    code: Any = 0
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), vars(module))
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code, traceback = 1, error.__traceback__
        assert traceback is not None
        sys.excepthook(type(error), error, traceback.tb_next)  # without this function
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends: threads, then exit handlers
    try:
        atexit._run_exitfuncs()
    finally:
        for file in (sys.stdout, sys.stderr):
            file.flush()
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        sys.stderr.flush()
        code = 1
    os._exit(code or 0)
