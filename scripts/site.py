"""Build the documentation site with Zensical, strictly: `scripts/site`.

The pages are Markdown that reads well in the repository, so they also link to files outside docs: examples, benchmarks,
sources. Zensical reads one folder, and follows symbolic links to files. So it gets a folder of links to the pages and
to what they name, laid out as the repository is: each address holds as it stands.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.docs.blocks import PAGES, ROOT, files_linked

_LOST: Final = ("Failed to get", "Warning:", "could not be")
"""What the plug-ins print about a page that lost something, without failing."""
_UNRESOLVED: Final = re.compile(r"\[<code>[^]]*\]")
"""A link by reference whose name has code in it, which Python-Markdown leaves as it is."""


def stage(folder: Path) -> None:
    """Make the folder that Zensical reads."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {ROOT / "docs/assets/site.css", *PAGES}.union(*map(files_linked, PAGES))
    for file in files:
        place = folder / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(file)


def configuration() -> str:
    """Return zensical.toml with the place of the sources, which Zensical would look for beside the built site."""
    return (ROOT / "zensical.toml").read_text(encoding="utf-8").replace('"ROOT', f'"{ROOT.as_posix()}')


def problems_of_build(folder: Path) -> list[str]:
    """Build `site` from the configuration and the pages in a folder; return what is wrong with it."""
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        return [re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)]
    lost = [line for line in done.stdout.splitlines() if any(words in line for words in _LOST)]
    unresolved = [
        f"{page.name}: {words} leads nowhere; write the address behind it, in parentheses"
        for page in sorted((folder / "site").rglob("*.html"))
        for words in _UNRESOLVED.findall(page.read_text(encoding="utf-8"))
    ]
    return lost + unresolved


def build(folder: Path) -> list[str]:
    """Build the whole site into `site` below a folder; return what is wrong with it."""
    stage(folder / "pages")
    (folder / "zensical.toml").write_text(configuration(), encoding="utf-8")
    return problems_of_build(folder)


if __name__ == "__main__":
    if problems := build(ROOT / "build"):
        sys.exit("\n".join([*problems, "error: the site has problems"]))
    sys.stderr.write("The site is in build/site\n")
