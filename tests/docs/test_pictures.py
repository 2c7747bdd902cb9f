"""The pictures of docs/assets are those that `scripts/pictures` draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from smpkit.cli.main import cli
from tests.docs.blocks import PAGES, ROOT

_SCRIPT = (ROOT / "scripts/pictures").read_text(encoding="utf-8")
_PLANS = re.findall(r"^plan ([\w-]+) '(.*)'$", _SCRIPT, re.MULTILINE)
_EXAMPLES = re.findall(r"^example (\w+)(.*)$", _SCRIPT, re.MULTILINE)


def drawn(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(cli, ["plan", *arguments, "--svg", str(folder / "plan.svg")])
    assert result.exit_code == 0, result.output
    return (folder / "plan.svg").read_text(encoding="utf-8")


def recorded(name: str) -> str:
    return (ROOT / f"docs/assets/{name}.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "parameters"), _PLANS, ids=[name for name, _ in _PLANS])
def test_a_picture_is_not_stale(name: str, parameters: str, tmp_path: Path) -> None:
    (tmp_path / "parameters.json").write_text(parameters, encoding="utf-8")
    assert drawn(tmp_path, str(tmp_path / "parameters.json")) == recorded(name), "run scripts/pictures"


@pytest.mark.parametrize(("name", "options"), _EXAMPLES, ids=[name for name, _ in _EXAMPLES])
def test_the_picture_of_an_example_is_not_stale(name: str, options: str, tmp_path: Path) -> None:
    picture = drawn(tmp_path, str(ROOT / f"examples/{name}/job.yaml"), *options.split())
    assert picture == recorded(f"example-{name.replace('_', '-')}"), "run scripts/pictures"


def test_each_picture_is_on_a_page_with_words_for_who_cannot_see_it() -> None:
    shown = {
        name: words
        for page in [*PAGES, *ROOT.glob("examples/*/README.md")]
        for words, name in re.findall(
            r"!\[([^]]*)\]\([./]*(?:docs/)?assets/([\w-]+\.svg)\)", page.read_text(encoding="utf-8")
        )
    }
    assert set(shown) == {path.name for path in (ROOT / "docs/assets").glob("*.svg")}
    assert all(len(words) > 20 for words in shown.values())
