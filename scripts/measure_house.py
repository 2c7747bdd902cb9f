"""Measure how the code is built: lines, files, cycles, modules with one importer, comments.

The figures describe, they are no limits: a figure that got worse asks for a look at the code, not for a trick.

Usage: scripts/measure-house [FOLDER]    (FOLDER: another checkout, such as a worktree of an older commit)
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOTS: Final = {"smpkit": "smpkit", "smpkit_estimator": "estimator/smpkit_estimator"}
ROOTS["smpkit_container"] = "container/smpkit_container"
RUNTIME: Final = "smpkit.torch"
_SHIMS: Final = "smpkit/drop_in/path"
"""SMP v1's import paths: one line each, not code of ours."""


class Module:
    """A source file: its lines, its functions and what it imports of the product."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.text = path.read_text()
        self.is_package = path.name == "__init__.py"
        self.tree = ast.parse(self.text)

    @property
    def is_facade(self) -> bool:
        """Whether this is the `__init__` of what users import, which shows the names of everything below."""
        return self.is_package and self.name in {"smpkit", RUNTIME}

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    def imports(self, known: Mapping[str, object]) -> set[str]:
        """Return the modules of the product that are imported anywhere: in functions and for type checkers, too."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    found.add(full if full in known else node.module)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
        return {each for each in found if each in known and each != self.name}

    def function_lengths(self) -> list[int]:
        """Return the lines of each function, without its docstring."""
        return [
            (node.end_lineno or 0) - (node.body[1] if _has_docstring(node) else node).lineno + 1
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not (_has_docstring(node) and not node.body[1:])
        ]

    def comments_and_code(self) -> tuple[int, int]:
        """Return how many lines are comments, or end with one, and how many are code."""
        comments: set[int] = set()
        code: set[int] = set()
        skip = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in skip:
                code.update(range(token.start[0], token.end[0] + 1))
        docstrings = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        return len(comments), len(code - docstrings)


def _has_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def modules_in(checkout: Path) -> dict[str, Module]:
    """Return the modules of the product by their names."""
    found = {}
    for package, folder in ROOTS.items():
        for path in sorted((checkout / folder).rglob("*.py")):
            if _SHIMS in path.as_posix():
                continue
            parts = path.relative_to(checkout / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = Module(name, path)
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def rows(modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Yield what is measured, and its figure."""
    runtime = {name: module for name, module in modules.items() if (name + ".").startswith(RUNTIME + ".")}
    graph = {name: module.imports(modules) for name, module in modules.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    folders: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
            if not modules[name].is_facade and _apart(modules[name].package, modules[target].package):
                folders[modules[name].package].add(modules[target].package)
    yield "product: lines, files", f"{_lines(modules):,}, {len(modules)}"
    yield "smpkit/torch: lines, files", f"{_lines(runtime):,}, {len(runtime)}"
    groups = cycles(folders)
    yield "folders in import cycles, all imports counted", f"{sum(map(len, groups))} in {len(groups)} cycles"
    for group in groups:
        yield "", " ".join(group)
    knots = cycles(graph)
    yield (
        "modules in import cycles, all imports counted",
        f"{sum(map(len, knots))} in {len(knots)}, at most {max(map(len, knots), default=0)}",
    )
    single = [name for name, module in modules.items() if len(importers[name]) == 1 and not module.is_package]
    yield "modules imported by one module only", str(len(single))
    lengths = [length for module in modules.values() for length in module.function_lengths()]
    yield (
        "functions: number, median, 90 %, longest",
        f"{len(lengths)}, {statistics.median(lengths):g}, {sorted(lengths)[len(lengths) * 9 // 10]}, {max(lengths)}",
    )
    comments, code = map(sum, zip(*(module.comments_and_code() for module in modules.values()), strict=True))
    yield "comment lines / code lines", f"{comments / code:.1%} ({comments:,} / {code:,})"


def _apart(folder: str, other: str) -> bool:
    """Return whether neither folder lies in the other: a folder and its own parts are one room."""
    return not f"{folder}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{folder}.")


def _lines(modules: Mapping[str, Module]) -> int:
    return sum(module.text.count("\n") for module in modules.values())


def main() -> None:
    """Print the table."""
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    sys.setrecursionlimit(10_000)
    for what, figure in rows(modules_in(checkout)):
        print(f"{what:50}  {figure}")
    print(
        "calls and frames per step: scripts/goldens --only calls; time per microbatch: benchmarks/pipeline/overhead.py"
    )


if __name__ == "__main__":
    main()
