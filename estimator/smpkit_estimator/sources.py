"""Find the files that make up a job's sources, and refuse what must not travel: links that lead out, secrets."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smpkit.config.words import printable, quoted
from smpkit.errors import ConfigError, Problem
from smpkit_estimator.ignore import IgnoreRules, is_secret

__all__ = ["Entry", "Sources", "collect"]


@dataclass(frozen=True)
class Entry:
    """One file of the archive."""

    name: str
    """Its path in the archive, with `/`."""
    path: Path
    executable: bool = False


@dataclass(frozen=True)
class Sources:
    """What is packed, sorted by name, and what was left out for a reason that the user should know."""

    entries: Sequence[Entry]
    secrets: Sequence[str] = ()
    """Names of files and folders that look like secrets: never packed."""
    specials: Sequence[str] = ()
    """Names of sockets, pipes, devices, and links to nothing: not files."""


@dataclass
class _Finder:
    root: Path
    prefix: str
    entries: list[Entry] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    specials: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    inside: list[Path] = field(default_factory=list)
    """Folders that links led into, on the way to the present one."""

    def walk(self, folder: Path, relative: str, rules: IgnoreRules) -> None:
        try:
            rules = rules.below(folder, relative)
            with os.scandir(folder) as found:
                items = list(found)
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"`{printable(str(folder))}` cannot be read: {error}")
            return
        for item in items:
            self._take(item, relative + item.name, rules)

    def _take(self, item: os.DirEntry[str], relative: str, rules: IgnoreRules) -> None:
        is_folder = item.is_dir(follow_symlinks=False)
        if rules.ignores(relative, is_folder=is_folder):
            return
        if is_secret(item.name):
            self.secrets.append(self.prefix + relative)
        elif item.is_symlink():
            self._link(Path(item.path), relative, rules)
        elif is_folder:
            self.walk(Path(item.path), f"{relative}/", rules)
        elif item.is_file(follow_symlinks=False):
            self.file(Path(item.path), relative, item.stat(follow_symlinks=False).st_mode)
        else:
            self.specials.append(self.prefix + relative)

    def file(self, path: Path, relative: str, mode: int) -> None:
        name = self.prefix + relative
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            self.problems.append(f"the name of `{printable(name)}` is not UTF-8")
            return
        self.entries.append(Entry(name, path, executable=bool(mode & stat.S_IXUSR)))

    def _link(self, path: Path, relative: str, rules: IgnoreRules) -> None:
        """Take what a link leads to, if that is inside: the launcher unpacks files and folders only."""
        name = self.prefix + relative
        try:
            target = path.resolve(strict=False)
            goes_round = target.is_symlink()  # Python 3.13 and later resolve a cycle of links to one of its links
        except (OSError, RuntimeError):
            goes_round = True
        if goes_round:
            self.problems.append(f"the link {quoted(name)} leads to itself")
            return
        if not target.is_relative_to(self.root):
            self.problems.append(f"the link {quoted(name)} leads out of the sources, to `{printable(str(target))}`")
        elif any(is_secret(part) for part in target.relative_to(self.root).parts):
            self.secrets.append(name)
        elif target.is_file():
            self.file(target, relative, target.stat().st_mode)
        elif not target.is_dir():
            self.specials.append(name)
        elif target in self.inside or path.is_relative_to(target):
            self.problems.append(f"the link {quoted(name)} leads to a folder that it is in")
        else:
            self.inside.append(target)
            self.walk(target, f"{relative}/", rules)
            self.inside.pop()


def collect(source: Path, dependencies: Sequence[Path] = (), *, only: str | None = None) -> Sources:
    """List what is packed of `source`, its content at the root, and of `dependencies`, each under its own name.

    Args:
        only: take this one file of `source` and no others.

    Raises:
        ConfigError: something cannot be read, a link leads out, or two things have one name; lists all problems.
    """
    finders = [_walked(source) if only is None else _single(source, only)]
    problems: list[Problem] = []
    for path in dependencies:
        if path.is_dir():
            finders.append(_walked(path, f"{path.resolve().name}/"))
        elif path.is_file():
            finders.append(_single(path.parent, path.name))
        else:
            problems.append(Problem(("dependencies",), f"there is no file or folder `{path}`"))
    problems += [Problem(("source_dir",), text, _hint(text)) for finder in finders for text in finder.problems]
    entries = sorted((entry for finder in finders for entry in finder.entries), key=lambda entry: entry.name)
    problems += _clashes(entries)
    if problems:
        raise ConfigError(problems, subject="sources")
    secrets = sorted(name for finder in finders for name in finder.secrets)
    specials = sorted(name for finder in finders for name in finder.specials)
    return Sources(entries, secrets, specials)


def _walked(folder: Path, prefix: str = "") -> _Finder:
    finder = _Finder(folder.resolve(), prefix)
    finder.walk(finder.root, "", IgnoreRules())
    return finder


def _single(folder: Path, name: str) -> _Finder:
    finder = _Finder(folder.resolve(), "")
    finder.file(folder / name, name, (folder / name).stat().st_mode)
    return finder


def _hint(text: str) -> str | None:
    return "put a copy in its place, or name it in .smpkitignore" if text.startswith("the link") else None


def _clashes(entries: Sequence[Entry]) -> Iterator[Problem]:
    for first, second in itertools.pairwise(entries):
        if first.name == second.name:
            message = f"`{first.name}` is both `{first.path}` and `{second.path}`"
            yield Problem(("dependencies",), message, "rename one of them")
