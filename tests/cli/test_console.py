from __future__ import annotations

import io

import click
import pytest
import rich.console
from click.testing import CliRunner

from smpkit.cli import _console
from smpkit.cli._console import Console
from smpkit.cli.status import can_repaint, live
from smpkit.errors import Problem


@pytest.mark.parametrize(
    ("verbosity", "said"),
    [
        (-1, ""),
        (0, "warning: a.b: is odd\n    hint: mend it\nnote\nhint: next\n"),
        (1, "warning: a.b: is odd\n    hint: mend it\nnote\nhint: next\nwhy\n"),
    ],
    ids=["quiet", "calm", "verbose"],
)
def test_verbosity_decides_what_is_said(verbosity: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(verbosity)
    console.warn(Problem(("a", "b"), "is odd", "mend it"))
    console.note("note")
    console.hint("next")
    console.detail("why")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


@click.command()
@click.option("-v", count=True)
@click.pass_context
def colourful(ctx: click.Context, v: int) -> None:
    _console.set_up(ctx, v)
    _console.current().warn("mind")


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=repr
)
def test_colours_are_for_terminals_that_want_them(environment: dict[str, str], coloured: bool) -> None:
    terminal = CliRunner(env={"TERM": "xterm", **environment}).invoke(colourful, [], color=True)
    assert ("\x1b[" in terminal.stderr) is coloured
    assert CliRunner(env=environment).invoke(colourful, []).stderr == "warning: mind\n"


def test_lines_are_painted_over_and_taken_away() -> None:
    file = io.StringIO()
    around = {"TERM": "xterm"}
    console = rich.console.Console(
        file=file, force_terminal=True, width=20, height=10, legacy_windows=False, _environ=around
    )
    with live(lambda: ["training", "x" * 30], console):
        pass
    painted = file.getvalue()
    assert "training\n" + "x" * 20 + "\n" + "x" * 10 in painted  # wrapped, so that the height is known
    assert painted.count("\x1b[2K") == 3
    assert painted.rindex("training") < painted.index("\x1b[2K")


@pytest.mark.parametrize("variable", ["NO_COLOR", "SMPKIT_NO_PROGRESS", "TERM"])
def test_who_minds_moving_parts_gets_lines(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("SMPKIT_NO_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert can_repaint()
    monkeypatch.setenv(variable, "dumb" if variable == "TERM" else "1")
    assert not can_repaint()
