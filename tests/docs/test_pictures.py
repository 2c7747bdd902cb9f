"""The pictures of docs/assets are those that `scripts/pictures` draws; so are plans on pages, as of offload_model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from smpkit.cli.main import cli
from tests.docs.blocks import ROOT

_SCRIPT = (ROOT / "scripts/pictures").read_text(encoding="utf-8")
_PLANNED = re.findall(r"^planned ([\w-]+) (.*)$", _SCRIPT, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, arguments, id=name, marks=[pytest.mark.slow] * ("--model " in arguments))
        for name, arguments in _PLANNED
    ],
)
def test_a_picture_is_not_stale(name: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    drawn = tmp_path / "plan.svg"
    result = CliRunner().invoke(cli, ["plan", *arguments.split(), "--svg", str(drawn)])
    assert result.exit_code == 0, result.output
    recorded = (ROOT / f"docs/assets/{name}.svg").read_text(encoding="utf-8")
    assert drawn.read_text(encoding="utf-8") == recorded, "run scripts/pictures"


_SHOWN = [
    pytest.param(command, answer, id=page.parent.name, marks=[pytest.mark.slow] * ("--model " in command))
    for page in sorted(ROOT.glob("examples/*/README.md"))
    for command, answer in re.findall(
        r"^\$ smpkit (plan(?:-offload-model)? (?:[^\n]*\\\n)*[^\n]*)\n((?:[^$`][^\n]*\n|\n)+)",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]


@pytest.mark.parametrize(("command", "answer"), _SHOWN)
def test_a_plan_that_an_example_shows_is_the_one_that_is_made(
    command: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    result = CliRunner().invoke(cli, shlex.split(command.replace("\\\n", " ")))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [line for line in answer.splitlines() if line.split() not in lines] == []
