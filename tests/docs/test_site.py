"""`scripts/site` follows links, and refuses what is broken. .ci/run builds the whole site."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path, PurePosixPath

import pytest

from scripts import site

ROOT = Path(__file__).parents[2]
_ZENSICAL = importlib.util.find_spec("zensical") is not None
needs_zensical = pytest.mark.skipif(not _ZENSICAL, reason="the extra `docs` is not installed; scripts/site installs it")


def relinked(text: str, source: str, repository: str = "") -> str:
    places = {
        PurePosixPath(path): PurePosixPath(place)
        for path, place in {
            "README.md": "index.md",
            "docs/how-to/tune.md": "how-to/tune.md",
            "docs/glossary.md": "glossary.md",
            "examples/gpt_text/README.md": "examples/gpt_text/index.md",
        }.items()
    }
    return site.relinked(text, PurePosixPath(source), places, repository)


def test_links_follow_their_pages() -> None:
    page = "[a](../../README.md) [b](../glossary.md#rank) [c](../../examples/gpt_text/README.md) [d](https://x.example)"
    moved = "[a](../index.md) [b](../glossary.md#rank) [c](../examples/gpt_text/index.md) [d](https://x.example)"
    assert relinked(page, "docs/how-to/tune.md") == moved


def test_a_file_that_is_no_page_is_linked_where_there_is_a_repository() -> None:
    page = "see [the table](../../smpkit/plan/tune/instances.py), [here](#below)"
    assert relinked(page, "docs/how-to/tune.md") == "see the table, [here](#below)"
    address = "https://code.example/smpkit/blob/main/smpkit/plan/tune/instances.py"
    known = relinked(page, "docs/how-to/tune.md", "https://code.example/smpkit")
    assert known == f"see [the table]({address}), [here](#below)"


def test_code_keeps_what_looks_like_a_link() -> None:
    page = "```python\nhooks[name](README.md)\n```\n[a](README.md)\n"
    assert relinked(page, "examples/gpt_text/README.md") == page.replace("[a](README.md)", "[a](index.md)")


@needs_zensical
@pytest.mark.slow
def test_the_site_has_the_api_the_command_line_and_a_search(tmp_path: Path) -> None:
    assert site.build(tmp_path / "site", tmp_path / "work") == 0
    reference = tmp_path / "site/reference"
    assert 'id="smpkit.torch.DistributedModel.backward"' in (reference / "python/runtime.html").read_text()
    assert "--pipeline-parallel-degree" in (reference / "cli.html").read_text()
    assert (tmp_path / "site/search.json").is_file()


@needs_zensical
def test_without_addresses_no_page_has_such_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "addresses", dict)
    site.stage(tmp_path)
    configuration = (tmp_path / "zensical.toml").read_text()
    assert [name for name in ("repo_url", "site_url") if name in configuration] == []
    known = site._configuration({"Repository": "https://code.example/smpkit", "Documentation": "https://docs.example"})
    assert 'repo_url = "https://code.example/smpkit"\nsite_url = "https://docs.example"' in known


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
        ('<img src="https://elsewhere.example/a.png">', "loads from another host"),
    ],
)
def test_what_is_broken_fails(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/glossary.md", tmp_path / "docs/glossary.md")
    configuration = site._configuration({})
    nav = configuration[configuration.index("nav = [") : configuration.index("[project.theme]")]
    (tmp_path / "zensical.toml").write_text(configuration.replace(nav, ""))
    (tmp_path / "docs/index.md").write_text(f"# Home\n\n{text}\n")
    assert said in "\n".join(site.problems_of_build(tmp_path))
