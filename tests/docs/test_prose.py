"""The rules for prose find what they are for, and nothing in code."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.prose import pages, problems


def found(tmp_path: Path, text: str) -> list[str]:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return [problem.removeprefix(str(tmp_path)) for problem in problems(page)]


def test_our_pages_are_clean() -> None:
    assert [problem for page in pages() for problem in problems(page)] == []


@pytest.mark.parametrize("text", ["The loss hangs on it.", "Ranks hear it.", "All are of one mind."])
def test_words_that_are_not_ours(tmp_path: Path, text: str) -> None:
    assert len(found(tmp_path, f"# Title\n\n{text}\n")) == 1
    assert found(tmp_path, f"# Title\n\n```text\n{text}\n```\n\n`{text}`\n<!-- {text} -->\n") == []


def test_long_sentences(tmp_path: Path) -> None:
    assert found(tmp_path, "word " * 40 + "end. And more.\n") == [
        "/page.md:1: a sentence of 41 words: " + ("word " * 12) + "..."
    ]
    assert found(tmp_path, "word " * 39 + "end.\n") == []
    assert found(tmp_path, ("- " + "word " * 30 + "\n") * 2) == []
    assert len(found(tmp_path, "a line\n\n" + ("word " * 20 + "\n") * 3)) == 1
