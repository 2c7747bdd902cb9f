"""`scripts/site` follows links, and refuses what is broken. .ci/run builds the whole site."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path, PurePosixPath

import pytest

import smpkit
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
def test_where_addresses_are_known_pages_can_be_edited_and_versions_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"Repository": "https://code.example/smpkit", "Documentation": "https://docs.example"}
    monkeypatch.setattr(site, "addresses", lambda: known)
    (tmp_path / "site/0.9.0").mkdir(parents=True)
    (tmp_path / "site/0.9.0/index.html").touch()  # what an earlier version has left
    monkeypatch.setattr(smpkit, "__version__", "0.10.0")
    assert site.build(tmp_path / "site", tmp_path / "work") == 0
    versions = json.loads((tmp_path / "site/versions.json").read_text())
    assert [(entry["version"], entry["aliases"]) for entry in versions] == [("0.10.0", ["latest"]), ("0.9.0", [])]
    assert "url=0.10.0/index.html" in (tmp_path / "site/index.html").read_text()
    newest = tmp_path / "site/0.10.0"
    assert 'id="smpkit.torch.DistributedModel.backward"' in (newest / "reference/python/runtime.html").read_text()
    assert "--pipeline-parallel-degree" in (newest / "reference/cli.html").read_text()
    assert (newest / "search.json").is_file()
    sources = {"glossary": "docs/glossary.md", "examples/finetune/index": "examples/finetune/README.md"}
    for page, source in sources.items():
        text = (newest / f"{page}.html").read_text()
        assert f'href="https://code.example/smpkit/edit/main/{source}"' in text
        assert f'href="https://docs.example/0.10.0/{page}.html"' in text
        assert '"provider": "mike"' in text or '"provider":"mike"' in text


@needs_zensical
def test_without_addresses_no_page_has_such_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "addresses", dict)
    site.stage(tmp_path)
    configuration = (tmp_path / "zensical.toml").read_text()
    links = ("repo_url", "edit_uri", "site_url", "content.action.edit", "mike")
    assert [name for name in links if name in configuration] == []


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
