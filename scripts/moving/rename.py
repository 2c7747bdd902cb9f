"""Rename identifiers by tables: python scripts/moving/rename.py [--check] TABLE.tsv...

A line of a table is `old<TAB>new<TAB>globs<TAB>flags`: the globs of the files in which `old` is renamed, separated by
spaces (`-` as first character takes files out again), and letters:

    s   also in strings that are exactly `old`, or a dotted name with `old` in it (`"state.home"`, as monkeypatch takes)
    c   also as a word of comments and docstrings, where it is a plain word
    m   the new name may exist in these files already: two names become one on purpose
    -   none of these

Every `Name` token is renamed, also attributes, parameters and keywords, but not paths of modules in imports. Names
with an underscore or a capital inside are renamed in comments and docstrings, too, as are all between backticks, and
in documents (.md) between backticks.
"""

from __future__ import annotations

import fnmatch
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import libcst as cst


class Rule(NamedTuple):
    old: str
    new: str
    globs: tuple[str, ...]
    flags: str
    place: str  # file:line of the rule

    def covers(self, path: str) -> bool:
        inside = False
        for glob in self.globs:
            if glob.startswith("-"):
                inside = inside and not fnmatch.fnmatch(path, glob[1:])
            else:
                inside = inside or fnmatch.fnmatch(path, glob)
        return inside


def read(tables: list[str]) -> list[Rule]:
    rules = []
    for table in tables:
        for number, line in enumerate(pathlib.Path(table).read_text().splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            fields = line.split("\t")
            if len(fields) != 4 or not fields[0].isidentifier() or not fields[1].isidentifier():
                sys.exit(f"{table}:{number}: not four fields with two identifiers: {line!r}")
            old, new, globs, flags = fields
            rules.append(Rule(old, new, tuple(globs.split()), flags, f"{table}:{number}"))
    return rules


def distinctive(name: str) -> bool:
    """Say whether a name can hardly be an English word."""
    return "_" in name.strip("_") or name.startswith("_") or bool(re.search("[a-z][A-Z]", name))


class Words:
    """Renames words of text by a file's rules, all at once: a swap of two names is no problem."""

    def __init__(self, rules: dict[str, Rule]) -> None:
        self.rules = rules
        plain = {name for name, rule in rules.items() if "c" in rule.flags or distinctive(name)}
        self._free = self._pattern(plain)
        self._ticked = self._pattern(set(rules))

    @staticmethod
    def _pattern(names: set[str]) -> re.Pattern[str] | None:
        if not names:
            return None
        longest = sorted(names, key=len, reverse=True)
        return re.compile(r"(?<![\w/-])(" + "|".join(map(re.escape, longest)) + r")(?![\w/-]|\.py\b)")

    def _replaced(self, pattern: re.Pattern[str] | None, text: str) -> str:
        return text if pattern is None else pattern.sub(lambda match: self.rules[match[1]].new, text)

    def free(self, text: str) -> str:
        parts = re.split(r"(`[^`\n]+`)", text)
        return "".join(self._replaced(self._ticked if part.startswith("`") else self._free, part) for part in parts)

    def ticked(self, text: str) -> str:
        parts = re.split(r"(`[^`\n]+`)", text)
        return "".join(self._replaced(self._ticked, part) if part.startswith("`") else part for part in parts)


class Renamer(cst.CSTTransformer):
    def __init__(self, words: Words, used: set[Rule]) -> None:
        self.words = words
        self.rules = words.rules
        self.used = used
        self.seen: set[str] = set()
        self._quoted = {name: rule for name, rule in self.rules.items() if "s" in rule.flags}

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        self.seen.add(updated_node.value)
        rule = self.rules.get(updated_node.value)
        if rule is None:
            return updated_node
        self.used.add(rule)
        return updated_node.with_changes(value=rule.new)

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        return updated_node.with_changes(module=original_node.module)

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        return original_node

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:
        return updated_node.with_changes(value=self.words.free(updated_node.value))

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        value = updated_node.value
        if '"""' in value or "'''" in value:
            return updated_node.with_changes(value=self.words.free(value))
        prefix = re.match(r"[a-zA-Z]*['\"]", value)
        assert prefix is not None
        start, end = prefix.end(), len(value) - 1
        inner = value[start:end]
        if re.fullmatch(r"[A-Za-z_][\w.]*", inner):
            pieces = inner.split(".")
            for index, piece in enumerate(pieces):
                rule = self._quoted.get(piece)
                if rule is not None:
                    self.used.add(rule)
                    pieces[index] = rule.new
            inner = ".".join(pieces)
        else:
            inner = self.words.ticked(inner)
        return updated_node.with_changes(value=value[:start] + inner + value[end:])


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    check = "--check" in sys.argv
    rules = read(arguments)
    used: set[Rule] = set()
    problems = 0
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], capture_output=True, text=True, check=True)
    for path in listed.stdout.split():
        if path.startswith(("scripts/moving/", "docs/internals/moved")):
            continue
        mine: dict[str, Rule] = {}
        for rule in rules:
            if rule.covers(path):
                known = mine.get(rule.old)
                if known is not None and known.new != rule.new:
                    sys.exit(f"{rule.place}: {rule.old} is also renamed to {known.new} ({known.place}) in {path}")
                mine[rule.old] = rule
        if not mine:
            continue
        text = pathlib.Path(path).read_text()
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for name in mine):
            continue
        words = Words(mine)
        if path.endswith(".md"):
            result = words.ticked(text)
        else:
            renamer = Renamer(words, used)
            result = cst.parse_module(text).visit(renamer).code
            for rule in mine.values():
                if rule.old in renamer.seen and rule.new in renamer.seen and "m" not in rule.flags:
                    if rule.new not in mine:  # else it moves away itself
                        print(f"clash: {path}: {rule.new} is there already ({rule.old}, {rule.place})")
                        problems += 1
        if result != text and not check:
            pathlib.Path(path).write_text(result)
    for rule in rules:
        if rule not in used:
            print(f"unused: {rule.place}: {rule.old}")
    if problems:
        print(f"{problems} clashes")
        sys.exit(1)


if __name__ == "__main__":
    main()
