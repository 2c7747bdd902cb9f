"""Build the documentation site with Zensical: `scripts/site [serve]`.

The pages are Markdown that reads well in the repository, so they link to files outside docs (examples, benchmarks,
sources). Zensical knows one folder only. So the pages are copied into one, and links follow: to the page where there is
one, else to the repository if `[project.urls]` in pyproject.toml has an address, else the text stays without a link.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from scripts import links
from scripts.links import BRANCH
from tests.docs.blocks import PAGES, blocks_of, problem_of

ROOT: Final = Path(__file__).parents[1]
_BUILD: Final = ROOT / "build" / "site"
"""Copies of the pages, and the configuration."""
_README: Final = PurePosixPath("README.md")
_LOADED: Final = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]*"[^>]*>""")
_UNRESOLVED: Final = re.compile(r"\[<code>[^]]*\]")
"""A link by reference whose name has code in it, which Python-Markdown leaves as it is."""
_TOLD: Final = ("Failed to get", "Warning:", "could not be")
"""What Zensical and the plug-ins print about a page that lost something, without failing."""


def pages() -> dict[PurePosixPath, PurePosixPath]:
    """Return where each file of the site lies in the repository, and where in the site's folder."""
    found = {PurePosixPath("CHANGELOG.md"): PurePosixPath("changelog.md")}
    found[PurePosixPath("CONTRIBUTING.md")] = PurePosixPath("contributing.md")
    found[_README] = PurePosixPath("index.md")
    for pattern in ("benchmarks/**/README.md", "examples/*/README.md"):
        for path in ROOT.glob(pattern):
            place = PurePosixPath(path.relative_to(ROOT).as_posix())
            found[place] = place.with_name("index.md")
    for path in (ROOT / "docs").rglob("*"):
        if path.is_file():
            place = PurePosixPath(path.relative_to(ROOT).as_posix())
            found[place] = place.relative_to("docs")
    return found


def addresses() -> dict[str, str]:
    """Return `[project.urls]`: `Repository` and `Documentation`, where they are set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {name: address.rstrip("/") for name, address in project.get("urls", {}).items()}


def relinked(text: str, source: PurePosixPath, places: Mapping[PurePosixPath, PurePosixPath], repository: str) -> str:
    """Return a page with links that hold in the site's folder.

    Args:
        text: the Markdown of the page.
        source: where the page lies in the repository.
        places: those of all pages.
        repository: its address; empty: files that are no pages are named without a link.
    """
    here = places[source].parent

    def moved(address: str, view: str = "blob") -> str | None:
        """Return where a link leads now; None: nowhere."""
        path, mark, anchor = address.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return address
        target = PurePosixPath(os.path.normpath(source.parent / path))
        if target in places:
            return f"{os.path.relpath(places[target], here)}{mark}{anchor}"
        return f"{repository}/{view}/{BRANCH}/{target}" if repository else None

    return links.relinked(text, moved, lambda address: moved(address, "raw") or address)


def stage(work: Path = _BUILD) -> None:
    """Copy what has changed, so that `serve` builds no more than that."""
    places, known = pages(), addresses()
    repository = known.get("Repository", "")
    wanted = {work / "zensical.toml": _configuration(known).encode()}
    for source, place in places.items():
        if source == _README:
            continue  # docs/index.md is the site's first page
        content = (ROOT / source).read_bytes()
        if source.suffix == ".md":
            content = relinked(content.decode(), source, places, repository).encode()
        wanted[work / "docs" / place] = content
    for path, content in wanted.items():
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in (work / "docs").rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def _configuration(known: Mapping[str, str]) -> str:
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8").replace('"ROOT', f'"{ROOT.as_posix()}')
    keys = {"repo_url": "Repository", "site_url": "Documentation"}
    lines = [f'{key} = "{known[name]}"' for key, name in keys.items() if name in known]
    return text.replace("[project]\n", "\n".join(["[project]", *lines, ""]), 1)


def build(folder: Path, work: Path = _BUILD) -> int:
    """Build the site into a folder, by way of one for copies of the pages; return the exit code."""
    stage(work)
    problems = [problem for page in PAGES for block in blocks_of(page) if (problem := problem_of(block))]
    problems += problems_of_build(work)
    if problems:
        sys.stderr.write("\n".join([*problems, "error: the site has problems", ""]))
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "site", folder)
    sys.stderr.write(f"{len(list(folder.rglob('*.html')))} pages in {folder}\n")
    return 0


def problems_of_build(folder: Path) -> list[str]:
    """Build what was copied; return what is wrong with it."""
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        return [re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)]
    lost = [line for line in done.stdout.splitlines() if any(word in line for word in _TOLD)]
    return [*lost, *_wrong_in(folder / "site")]


def _wrong_in(built: Path) -> Iterator[str]:
    """Yield what a page would load from another host, and what should be a link and is none."""
    for page in sorted(built.rglob("*.html")):
        text, name = page.read_text(encoding="utf-8"), page.relative_to(built)
        for tag in _LOADED.findall(text):
            if "canonical" not in tag:
                yield f"{name} loads from another host: {tag}"
        for words in _UNRESOLVED.findall(text):
            yield f"{name}: {words} leads nowhere; write the address behind it, in parentheses"


def serve(port: int) -> int:
    """Serve the site on loopback, and build again what changes, until Ctrl-C."""
    stage()
    command = [sys.executable, "-m", "zensical", "serve", "--dev-addr", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, cwd=_BUILD) as server:
        try:
            while server.poll() is None:
                time.sleep(1)
                stage()
        except KeyboardInterrupt:
            server.terminate()
        return server.wait()


def main() -> int:
    """Build or serve."""
    parser = argparse.ArgumentParser(prog="scripts/site", description="Build the documentation site.")
    parser.add_argument("what", nargs="?", choices=("build", "serve"), default="build")
    parser.add_argument("--port", type=int, default=8000, help="of `serve` (8000)")
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="folder of `build` (site)")
    options = parser.parse_args()
    return serve(options.port) if options.what == "serve" else build(options.output)


if __name__ == "__main__":
    sys.exit(main())
