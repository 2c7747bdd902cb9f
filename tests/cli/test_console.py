from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from smpkit.cli import _console
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
    with click.Context(colourful) as ctx:
        _console.set_up(ctx, verbosity)
        _console.warn(Problem(("a", "b"), "is odd", "mend it"))
        _console.note("note")
        _console.hint("next")
        _console.detail("why")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", said)


@click.command()
@click.option("-v", count=True)
@click.pass_context
def colourful(ctx: click.Context, v: int) -> None:
    _console.set_up(ctx, v)
    _console.warn("mind")


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)], ids=repr
)
def test_colours_are_for_terminals_that_want_them(environment: dict[str, str], coloured: bool) -> None:
    terminal = CliRunner(env={"TERM": "xterm", **environment}).invoke(colourful, [], color=True)
    assert ("\x1b[" in terminal.stderr) is coloured
    assert CliRunner(env=environment).invoke(colourful, []).stderr == "warning: mind\n"
