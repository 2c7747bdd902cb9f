"""Compare the functions of two commits: python scripts/moving/functions.py OLD NEW [--erase-names]

Every function and method of smpkit and the tests is dumped as an AST without docstrings and without the modules of its
imports; the multiset of all dumps must be the same. With --erase-names identifiers are numbered in order of appearance
first, and strings that are identifiers count as such: for commits that rename.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter

FOLDERS = ["smpkit", "estimator", "container", "tests", "benchmarks"]


def sources(commit: str) -> dict[str, str]:
    known = subprocess.run(["git", "ls-tree", "--name-only", commit], capture_output=True, text=True, check=True)
    folders = [folder for folder in FOLDERS if folder in known.stdout.split()]
    archive = subprocess.run(["git", "archive", commit, *folders], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = {}
        for member in tar.getmembers():
            if member.name.endswith(".py"):
                stream = tar.extractfile(member)
                assert stream is not None
                found[member.name] = stream.read().decode()
        return found


class Normalised(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        names = sorted((alias.asname or alias.name) for alias in node.names)
        return ast.ImportFrom(module="-", names=[ast.alias(name) for name in names], level=0)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):  # module paths in strings
            node.value = re.sub(r"\b(smpkit|tests)[./]torch[./][\w./]+", "PATH", node.value)
        return node


class Erased(ast.NodeTransformer):
    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"n{len(self.numbers)}")

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("name", "id", "arg", "attr", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, self.number(value))
        if isinstance(node, ast.Global | ast.Nonlocal):
            node.names = [self.number(name) for name in node.names]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = "text"
        if isinstance(node, ast.ImportFrom):  # sorted by name: their order says nothing
            node.names = []
        if isinstance(node, ast.MatchStar | ast.MatchAs) and node.name:
            node.name = self.number(node.name)
        return super().generic_visit(node)


def functions(commit: str, erase: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for text in sources(commit).values():
        tree = Normalised().visit(ast.parse(text))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if erase:
                    node = Erased().visit(ast.parse(ast.unparse(ast.fix_missing_locations(node))))
                found[ast.dump(node)] += 1
    return found


def main() -> None:
    old, new = (argument for argument in sys.argv[1:] if not argument.startswith("--"))
    before, after = (functions(commit, "--erase-names" in sys.argv) for commit in (old, new))
    print(f"{before.total()} functions in {old}, {after.total()} in {new}")
    for what, rest in (("only before", before - after), ("only after", after - before)):
        print(f"{what}: {rest.total()}")
        for dump in list(rest)[:20]:
            print("   ", dump[:300])
    sys.exit(before != after)


if __name__ == "__main__":
    main()
