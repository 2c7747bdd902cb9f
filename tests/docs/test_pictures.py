"""The pictures of docs/assets are those that `scripts/pictures` draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from smpkit.cli.main import cli
from tests.docs.blocks import PAGES, ROOT

_PLANS = re.findall(r"^plan ([\w-]+) '(.*)'$", (ROOT / "scripts/pictures").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("name", "parameters"), _PLANS, ids=[name for name, _ in _PLANS])
def test_a_picture_is_not_stale(name: str, parameters: str, tmp_path: Path) -> None:
    (tmp_path / "parameters.json").write_text(parameters, encoding="utf-8")
    given, picture = tmp_path / "parameters.json", tmp_path / "plan.svg"
    result = CliRunner().invoke(cli, ["plan", str(given), "--svg", str(picture)])
    assert result.exit_code == 0, result.output
    drawn = picture.read_text(encoding="utf-8")
    assert drawn == (ROOT / f"docs/assets/{name}.svg").read_text(encoding="utf-8"), "run scripts/pictures"


def test_each_picture_is_on_a_page_with_words_for_who_cannot_see_it() -> None:
    shown = {
        name: words
        for page in PAGES
        for words, name in re.findall(
            r"!\[([^]]*)\]\([./]*(?:docs/)?assets/([\w-]+\.svg)\)", page.read_text(encoding="utf-8")
        )
    }
    assert set(shown) == {path.name for path in (ROOT / "docs/assets").glob("*.svg")}
    assert all(len(words) > 20 for words in shown.values())
