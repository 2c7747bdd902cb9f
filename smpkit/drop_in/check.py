"""What a script imports that cannot be imported here, and names of SMP v1 that it uses and that do not exist.

The script is read, not run. What it imports is imported by another process, prepared as `smpkit compat` does.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

from smpkit.config.words import suggestion
from smpkit.drop_in import installed_one, sources, with_drop_in
from smpkit.errors import UsageError

__all__ = ["Check", "Finding", "Kind", "check"]

Kind = Literal["smp", "unknown", "missing"]
_V1: Final = "smdistributed.modelparallel"


@dataclass(frozen=True)
class Finding:
    """One name in one place.

    Args:
        kind: a name of SMP v1 (`smp`), one that it lacks (`unknown`), or `missing` here.
        name: with its module; SMP v1's begin with `smp.`.
        file, line: where it is.
        message: why, or what is meant.
        optional: the import stands in a function or below `try` or `if`, so the script may do without it.
    """

    kind: Kind
    name: str
    file: str
    line: int
    message: str | None = None
    optional: bool = False

    @property
    def is_problem(self) -> bool:
        """Whether the script cannot run because of this."""
        return self.kind != "smp" and not self.optional


@dataclass(frozen=True)
class Check:
    """What there is in scripts: the files that were read, and findings, each name once for each file."""

    files: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What keeps the scripts from running."""
        return tuple(finding for finding in self.findings if finding.is_problem)

    def of(self, kind: Kind) -> tuple[Finding, ...]:
        """Return the findings of a kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)


def check(paths: Sequence[Path]) -> Check:
    """Read scripts, and all below folders.

    Raises:
        UsageError: a path that is not there, holds no Python, or cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        below = list(sources(path)) if path.is_dir() else [path]
        if not below or not path.exists():
            what = "holds no Python files" if path.exists() else "does not exist"
            raise UsageError(f"`{path}` {what}", hint="give the script, or the folder of its sources")
        files += below
    uses: list[Finding] = []
    folders = {*(path for path in paths if path.is_dir()), *(file.parent for file in files)}
    for file in dict.fromkeys(files):
        uses += (use for use in _read(file) if not _is_local(use.name, folders))
    findings: dict[tuple[str, str], Finding] = {}
    for finding in _judge(uses):
        earlier = findings.setdefault((finding.file, finding.name), finding)
        if earlier.optional and not finding.optional:
            findings[finding.file, finding.name] = finding
    return Check(tuple(map(str, dict.fromkeys(files))), tuple(findings.values()))


def _is_local(name: str, folders: Collection[Path]) -> bool:
    """Return whether a module lies beside the scripts."""
    root = name.partition(".")[0]
    return any((folder / f"{root}.py").is_file() or any((folder / root).glob("*.py")) for folder in folders)


def _read(path: Path) -> Iterator[Finding]:
    """Yield what a file imports, then what it uses of modules of SMP v1, with full names."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UsageError(f"{path}:{line} is not Python {sys.version_info.major}: {error.args[0]}") from None
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read: {error.strerror}") from None
    unconditional = set(tree.body)
    bound: dict[str, Finding] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [(alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported = [
                (str(node.module), None) if alias.name == "*" else (f"{node.module}.{alias.name}", alias.asname)
                for alias in node.names
            ]
        else:
            continue
        for name, alias in imported:
            use = Finding("missing", name, str(path), node.lineno, optional=node not in unconditional)
            yield use
            if name.startswith(_V1):
                # `import a.b` binds `a`; every other import binds the last name, or its alias.
                is_plain = isinstance(node, ast.Import) and alias is None
                full = name.partition(".")[0] if is_plain else name
                bound[alias or full.rpartition(".")[2]] = replace(use, name=full)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", chain := ast.unparse(node)):
            root, _, rest = chain.partition(".")
            if root in bound:
                yield replace(bound[root], name=f"{bound[root].name}.{rest}", line=node.lineno)


# --- importing, in a process of its own -------------------------------------------------------------------------------


def _judge(uses: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the uses that are names of SMP v1, and those that fail."""
    environ = dict(os.environ) if installed_one() else with_drop_in(os.environ)
    names = list(dict.fromkeys(use.name for use in uses))
    command = [sys.executable, "-m", "smpkit.drop_in.check"]
    done = subprocess.run(command, input=json.dumps(names), env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"the imports cannot be tried: {done.stderr.strip().splitlines()[-1]}")
    answers = dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for use in uses:
        if answers[use.name] is not None:
            kind, name, message = answers[use.name]
            yield replace(use, kind=kind, name=name, message=message)


def _try_import(full: str) -> tuple[Kind, str, str | None] | None:
    """Return what is to be said of a name, and the part of it that exists or fails; None: nothing."""
    parts = full.split(".")
    is_v1 = f"{full}.".startswith(f"{_V1}.torch.")
    thing: object = None
    for count, part in enumerate(parts, 1):
        name = ".".join(parts[:count])
        shown = name.replace(f"{_V1}.torch", "smp", 1)
        try:
            thing = getattr(thing, part) if count > 1 and hasattr(thing, part) else importlib.import_module(name)
        except Exception as error:
            if is_v1 and thing is not None:
                return "unknown", shown, suggestion(part, [known for known in dir(thing) if known[0] != "_"])
            return "missing", shown, f"{error}"
        if not isinstance(thing, ModuleType):  # what follows are attributes of an object
            break
    return ("smp", shown, None) if is_v1 and shown != "smp" else None


if __name__ == "__main__":
    print(json.dumps([_try_import(name) for name in json.loads(sys.stdin.read())]))  # noqa: T201
