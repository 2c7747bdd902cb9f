from __future__ import annotations

import io

import pytest
from rich.console import Console

from smpkit.cli.status import can_repaint, live


def test_lines_are_painted_over_and_taken_away() -> None:
    file = io.StringIO()
    around = {"TERM": "xterm"}
    console = Console(file=file, force_terminal=True, width=20, height=10, legacy_windows=False, _environ=around)
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
