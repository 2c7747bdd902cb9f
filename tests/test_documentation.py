"""The pages that are written from the code are what the code says, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import smpkit.cli.reference
import smpkit.torch.reference

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("benchmarks/**/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("module", [smpkit.cli.reference, smpkit.torch.reference], ids=lambda module: module.__name__)
def test_pages_from_the_code_are_not_stale(module: object) -> None:
    path = ROOT / module.DEFAULT_PATH  # type: ignore[attr-defined]
    assert module.main([str(path), "--check"]) == 0, "run scripts/docs"  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"(?:\]\(|^\[[^]]+\]: )([^)\s]+)", text, re.MULTILINE) if "://" not in link]
    targets = {link: page.parent / path if (path := link.partition("#")[0]) else page for link in links}
    assert [link for link, target in targets.items() if not target.exists()] == []
    anchors = {link: link.partition("#")[2] for link in links if "#" in link}
    assert [link for link, anchor in anchors.items() if anchor not in headings(targets[link])] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES if ROOT / "docs" in path.parents]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_named_files_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "smpkit/torch" / path).exists()] == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
