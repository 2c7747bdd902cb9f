"""Check the English of all pages of the site: a word list, and sentences of at most 40 words.

codespell, which `scripts/lint` runs beside it, checks the spelling. General checkers of style do not know our words or
Markdown's tables well enough to be strict, so the rules are here: few, and each an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.docs.blocks import PAGES, ROOT

_MAX_WORDS: Final = 40
_WORDS: Final = {
    r"\bhang(s|ing)? on\b": "say `depends on`",
    r"\bhears?\b": "programs receive, they do not hear",
    r"\bof one mind\b": "say `agree`",
    r"\bcannot be meant\b": "say `is invalid`",
    r"\bits fate\b": "say `the result`",
    r"\bthe two of them\b": "say `both`",
    r"\butili[sz]e": "say `use`",
    r"\bin order to\b": "say `to`",
    r"\bleverag(e|es|ing)\b": "say `use`",
    r"\bseamless": "say what happens",
    r"\bblazing|\bpowerful\b|\brobust\b|\bcutting-edge\b": "give a figure",
    r"\bsimply\b|\bobviously\b|\bof course\b": "leave it out",
    r"\bplease\b": "leave it out",
}
_CODE: Final = re.compile(r"^( *)```.*?^\1```$|<!--.*?-->|^:::.*\n(?: +.*\n)*", re.MULTILINE | re.DOTALL)
_BREAK: Final = re.compile(r"^ *(?:[-*] |\d+\. |\||#|>|$|!!! |\[[^]]+\]: )")
"""What begins a paragraph: items of lists, rows of tables, headings, empty lines, addresses of links."""


def problems(page: Path) -> Iterator[str]:
    """Yield what is wrong with a page, each with its line."""
    text = page.read_text(encoding="utf-8")
    text = _CODE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, paragraph in _paragraphs(text):
        plain = re.sub(r"`[^`]*`", "X", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph))
        place = f"{page.relative_to(ROOT)}:{number}"
        for pattern, advice in _WORDS.items():
            if match := re.search(pattern, plain, re.IGNORECASE):
                yield f"{place}: `{match[0]}`: {advice}"
        if not paragraph.lstrip().startswith("|"):
            for sentence in re.split(r"[.!?](?:\*\*|\)|”|\")* +", plain):
                if (count := len(re.findall(r"[\w'’-]*[A-Za-z][\w'’-]*", sentence))) > _MAX_WORDS:
                    yield f"{place}: a sentence of {count} words: {sentence[:60]}..."


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs in one line each, with the number of their first line."""
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if _BREAK.match(line) and lines:
            yield number - len(lines), " ".join(lines)
            lines = []
        if line.strip():
            lines.append(line)


if __name__ == "__main__":
    sys.exit("\n".join(problem for page in PAGES for problem in problems(page)) or None)
