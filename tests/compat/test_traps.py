"""README.md names the traps of a drop-in, and for each the tests that would notice."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_the_table_of_traps_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", (FOLDER / "README.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 23))
    for number, cell in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named, f"trap {number} names no test"
        for file, name in named:
            path = FOLDER.parent / file
            found = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
            assert name in found, f"trap {number}: {file} has no {name}"
