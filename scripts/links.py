"""Links of a page that is read elsewhere than in the repository: each follows its file, or leaves its words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Final

BRANCH: Final = "main"
_FENCE: Final = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)")
_DEFINITION: Final = re.compile(r"^(\[[^]]+\]: )(\S+)$", re.MULTILINE)


def relinked(text: str, moved: Callable[[str], str | None], picture: Callable[[str], str | None] | None = None) -> str:
    """Return a page with other addresses; code blocks stay as they are.

    Args:
        text: the Markdown of the page.
        moved: the new address for that of a link; None leaves the link's words.
        picture: the same for pictures, which vanish where it gives None; by default they stay.
    """

    def link(match: re.Match[str]) -> str:
        if match[1]:
            address = match[3] if picture is None else picture(match[3])
            return f"![{match[2]}]({address})" if address is not None else ""
        address = moved(match[3])
        return match[2] if address is None else f"[{match[2]}]({address})"

    def definition(match: re.Match[str]) -> str:
        return f"{match[1]}{moved(match[2]) or match[2]}"

    def prose(part: str) -> str:
        return _DEFINITION.sub(definition, _LINK.sub(link, part))

    return "".join(part if is_code else prose(part) for is_code, part in _parts(text))


def absolute(text: str, repository: str) -> str:
    """Return the repository's README as a package index shows it, where no relative address leads anywhere.

    Args:
        text: its Markdown.
        repository: the address of the repository; empty: links leave their words, and pictures vanish.
    """

    def at(view: str) -> Callable[[str], str | None]:
        def address(given: str) -> str | None:
            if "://" in given or given.startswith(("#", "mailto:")):
                return given
            return f"{repository}/{view}/{BRANCH}/{PurePosixPath(given)}" if repository else None

        return address

    return relinked(text, at("blob"), at("raw"))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Split a page into code blocks and the rest."""
    end = 0
    for match in _FENCE.finditer(text):
        yield False, text[end : match.start()]
        yield True, match[0]
        end = match.end()
    yield False, text[end:]
