"""Which imports of a script fail here, and which names of SMP v1 it uses that do not exist.

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
from typing import Final

from smpkit.config.words import suggestion
from smpkit.drop_in import installed_one, sources, with_drop_in
from smpkit.errors import UsageError

_V1: Final = "smdistributed.modelparallel"
_IMPORT_SECONDS: Final = 600


@dataclass(frozen=True)
class Finding:
    """A name that cannot be had.

    Args:
        name: with its module; SMP v1's begin with `smp.`.
        file, line: where it is.
        message: why, or what is meant.
        optional: the import stands in a function or below `try` or `if`, so the script may do without it.
    """

    name: str
    file: str
    line: int
    message: str = ""
    optional: bool = False


def check(paths: Sequence[Path]) -> list[Finding]:
    """Read scripts, and all below folders; return what fails, each name once for each file."""
    files: dict[Path, None] = {}
    for path in paths:
        below = list(sources(path)) if path.is_dir() else [path]
        if not below or not path.exists():
            what = "holds no Python files" if path.exists() else "does not exist"
            raise UsageError(f"`{path}` {what}", hint="give the script, or the folder of its sources")
        files |= dict.fromkeys(below)
    folders = {*(path for path in paths if path.is_dir()), *(file.parent for file in files)}
    uses = [use for file in files for use in _read(file) if not _is_local(use.name, folders)]
    findings: dict[tuple[str, str], Finding] = {}
    for finding in sorted(_failing(uses), key=lambda finding: finding.optional):  # what is needed once is needed
        findings.setdefault((finding.file, finding.name), finding)
    return list(findings.values())


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
            use = Finding(name, str(path), node.lineno, optional=node not in unconditional)
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


def _failing(uses: Sequence[Finding]) -> Iterator[Finding]:
    environ = dict(os.environ) if installed_one() else with_drop_in(os.environ)
    names = list(dict.fromkeys(use.name for use in uses))
    command = [sys.executable, "-m", "smpkit.drop_in.check"]
    try:
        done = subprocess.run(
            command, input=json.dumps(names), env=environ, capture_output=True, text=True, check=False,
            timeout=_IMPORT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"the imports cannot be tried: they did not end within {_IMPORT_SECONDS} s") from None
    if done.returncode:
        raise UsageError(f"the imports cannot be tried: {done.stderr.strip().splitlines()[-1]}")
    failures = dict(zip(names, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for use in uses:
        if failures[use.name] is not None:
            name, message = failures[use.name]
            yield replace(use, name=name, message=message)


def _failure_of(full: str) -> tuple[str, str] | None:
    """Return the part of a name that cannot be had, and why; None if it can."""
    parts = full.split(".")
    thing: object = None
    for count, part in enumerate(parts, 1):
        name = ".".join(parts[:count])
        try:
            thing = getattr(thing, part) if count > 1 and hasattr(thing, part) else importlib.import_module(name)
        except Exception as error:
            shown = name.replace(f"{_V1}.torch", "smp", 1)
            known = [known for known in dir(thing) if known[0] != "_"] if shown != name else []
            return shown, suggestion(part, known) or str(error)
        if not isinstance(thing, ModuleType):  # what follows are attributes of an object
            break
    return None


if __name__ == "__main__":
    print(json.dumps([_failure_of(name) for name in json.loads(sys.stdin.read())]))  # noqa: T201
