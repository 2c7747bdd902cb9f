"""`scripts/site` refuses what is broken. .ci/run builds the whole site."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from scripts import site
from tests.docs.blocks import ROOT

_ZENSICAL = importlib.util.find_spec("zensical") is not None
needs_zensical = pytest.mark.skipif(not _ZENSICAL, reason="the extra `docs` is not installed; scripts/site installs it")


@needs_zensical
@pytest.mark.slow
def test_the_site_has_the_api_the_command_line_and_a_search(tmp_path: Path) -> None:
    assert site.build(tmp_path) == []
    reference = tmp_path / "site/docs/reference"
    assert 'id="smpkit.torch.DistributedModel.backward"' in (reference / "python/runtime.html").read_text()
    assert "--pipeline-parallel-degree" in (reference / "cli.html").read_text()
    assert (tmp_path / "site/search.json").is_file()


@needs_zensical
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[lost](nowhere.md)", "page does not exist"),
        ("[lost](glossary.md#nowhere)", "anchor does not exist"),
        ("::: smpkit.torch.nowhere", "could not be"),
        ("[lost][smpkit.torch.nowhere]", "unresolved autoref"),
        ("[`lost`]\n\n[`lost`]: glossary.md", "leads nowhere"),
    ],
)
def test_what_is_broken_fails(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pages").mkdir()
    shutil.copy(ROOT / "docs/glossary.md", tmp_path / "pages")
    configuration = re.sub(r"^nav = .*?^\]\n", "", site.configuration(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "zensical.toml").write_text(configuration)
    (tmp_path / "pages/index.md").write_text(f"# Home\n\n{text}\n")
    assert said in "\n".join(site.problems_of_build(tmp_path))
