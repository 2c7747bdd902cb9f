"""The code blocks of a Markdown page, and what a comment before each of them says about running it.

A block runs unless the line before it says otherwise; readers of the page do not see these comments::

    <!-- run: slow -->                  only in `pytest -m slow`: it takes seconds
    <!-- run: exits 1 -->               a command that fails, with this code
    <!-- run: ranks 2 -->               the page's Python, on as many ranks
    <!-- run: alone -->                 Python that does not go on from the blocks before it
    <!-- run: given plain -->           Python that goes on from given_plain.py, not from the blocks before it
    <!-- run: any output -->            what is shown is not compared
    <!-- file: train.py -->             it is written to that file, for the blocks after it
    <!-- run by: tests/device/test_sim_page.py -->   that test runs it
    <!-- not run: needs Docker -->      with the reason

Several of `run` are parted by commas.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CODE: Final = ("python", "yaml", "console", "diff")
"""Languages of blocks that run."""
DRAWN: Final = ("", "text")
"""Drawings and outputs."""
PAGES: Final = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("benchmarks/**/README.md")),
)
"""All pages of the site."""
_OPTIONS: Final = re.compile(r"slow|alone|any output|exits \d+|ranks \d+|given \w+")


def files_linked(page: Path) -> list[Path]:
    """Return the files of the repository that a page names in links and pictures."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"(?:\]\(|^\[[^]]+\]: )([^)#\s]+)", text, re.MULTILINE)
    return [Path(os.path.normpath(page.parent / link)) for link in links if "://" not in link]


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """The number of its first line of code, from 1."""
    language: str
    text: str
    options: frozenset[str] = frozenset()
    file: str = ""
    run_by: str = ""
    not_run: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in CODE and not (self.run_by or self.not_run)

    @property
    def given(self) -> str:
        """NAME of an option `given NAME`."""
        return next((each.split()[1] for each in self.options if each.startswith("given ")), "")

    def number(self, option: str, default: int) -> int:
        """Return N of an option `exits N` or `ranks N`."""
        found = [each.split()[1] for each in self.options if each.startswith(f"{option} ")]
        return int(found[0]) if found else default


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order; raise ValueError for a comment that means nothing."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opened = re.match(r"( *)```(\w*)", lines[number])
        if opened is None:
            number += 1
            continue
        indent = opened[1]
        end = next(n for n in range(number + 1, len(lines)) if lines[n].rstrip() == f"{indent}```")
        text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n"
        said = _said(lines[number - 1].strip(), f"{page}:{number}") if number else {}
        yield Block(page, number + 2, opened[2], text, **said)  # type: ignore[arg-type]
        number = end + 1


def _said(line: str, place: str) -> dict[str, str | frozenset[str]]:
    found = re.fullmatch(r"<!-- (run|file|run by|not run): (.+) -->", line)
    if found is None:
        return {}
    if found[1] != "run":
        return {found[1].replace(" ", "_"): found[2]}
    options = [each.strip() for each in found[2].split(",")]
    if unknown := [each for each in options if not _OPTIONS.fullmatch(each)]:
        raise ValueError(f"{place}: `run: {unknown[0]}` means nothing; see {__file__}")
    return {"options": frozenset(options)}


def problem_of(block: Block) -> str:
    """Return why nothing runs a block, though nothing says that it is not to; empty if all is well.

    A test that runs a block names its page, or the folder whose README the page is.
    """
    if block.language not in (*CODE, *DRAWN):
        return f"{block.place}: nothing runs ```{block.language}"
    if block.language in DRAWN and (block.options or block.run_by or block.not_run):
        return f"{block.place}: a drawing does not run, but there is a comment on running it"
    test, page = ROOT / block.run_by, block.page
    named = page.parent.name if page.name == "README.md" and page.parent != ROOT else page.name
    if block.run_by and not (test.is_file() and named in test.read_text(encoding="utf-8")):
        return f"{block.place}: {block.run_by} does not run it"
    return ""
