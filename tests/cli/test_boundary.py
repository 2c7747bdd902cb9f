from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from smpkit import errors
from smpkit.cli.main import exit_code_of
from tests.cli.conftest import process


def raising(error: BaseException) -> Callable[[], Any]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.SmpkitError("x"), 1),
        (errors.ConfigError([errors.Problem((), "x")]), 2),
        (errors.UsageError("x"), 2),
        (errors.UnsupportedError("x"), 2),
        (errors.LaunchError("x"), 1),
        (errors.DeadlineError("x"), 1),
        (errors.RemoteError("x"), 1),
        (errors.CheckpointError("x"), 1),
        (errors.CloudError("x"), 4),
        (click.UsageError("x"), 2),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_each_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code_of(raising(error)) == code


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (7, 7), ("text", 0)], ids=repr)
def test_a_returned_integer_is_the_exit_code(result: object, code: int) -> None:
    assert exit_code_of(lambda: result) == code


def test_a_bug_has_its_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's names a rank, after tests of ranks
    assert exit_code_of(raising(ZeroDivisionError("oh"))) == 3
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert "ZeroDivisionError: oh\nerror: a bug in smpkit: ZeroDivisionError\nhint: send these lines" in shown


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write: no space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b\n"), "cannot use `/a/b\\n`: permission denied"),
    ],
    ids=["full disk", "no permission"],
)
def test_what_the_machine_refuses_is_no_bug(error: OSError, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(raising(error)) == 1
    assert capsys.readouterr().err == f"error: {said}\n"


SCRIPT = """\
import sys
import click
from smpkit.cli.main import exit_code_of
def action():
    for _ in range(100_000):
        click.echo("x" * 100)
sys.exit(exit_code_of(action))
"""


def shell(line: str) -> tuple[str, str]:
    """Return what a line of bash prints to both streams; `python` is ours."""
    command = ["bash", "-c", f'python() {{ "{sys.executable}" "$@"; }}\n{line}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done.stdout, done.stderr


def test_a_reader_that_leaves_a_pipe_causes_no_noise() -> None:
    assert shell(f"python -c '{SCRIPT}' | head -c 10; echo ${{PIPESTATUS[0]}}") == ("x" * 10 + "1\n", "")


def test_what_python_still_holds_for_a_reader_that_left_causes_no_noise() -> None:
    """It would write that at exit, say `Exception ignored`, and end with 120."""
    script = "import sys; from smpkit.cli.main import exit_code_of; sys.exit(exit_code_of(lambda: print('x')))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered, timeout=100, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_streams_that_the_caller_closed_are_not_taken_by_files() -> None:
    assert shell("python -m smpkit schema <&- >&- 2>&-; echo $?") == ("0\n", "")


def test_what_the_encoding_of_stdout_lacks_is_escaped() -> None:
    tick = "import sys, smpkit.__main__ as m; m._open_standard_streams(); print('\\u2713 \\udcff')"
    assert shell(f'PYTHONIOENCODING=latin-1 python -c "{tick}"') == ("\\u2713 \\udcff\n", "")


def test_sigterm_ends_a_command_so_that_it_can_undo_what_it_began(tmp_path: Path) -> None:
    lines = ["import os, signal", "try: os.kill(os.getpid(), signal.SIGTERM)", "finally: print('undone')"]
    (tmp_path / "click.py").write_text("\n".join(lines))
    done = process("schema", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (done.returncode, done.stdout, done.stderr) == (143, "undone\n", "")


def test_ctrl_c_while_the_command_line_loads_is_said_like_any_other(tmp_path: Path) -> None:
    """A `click` that is interrupted while it is imported stands in for the moment."""
    (tmp_path / "click.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = process("schema", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
