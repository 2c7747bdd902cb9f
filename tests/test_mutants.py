"""The list of mutants fits the code: `scripts/mutants` itself takes an hour."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import mutants

FOUND = mutants.mutants()
RECORDED: dict[str, list[str]] = json.loads((mutants.ROOT / mutants.MAP).read_text())


@pytest.mark.parametrize("mutant", FOUND, ids=lambda mutant: mutant.id)
def test_what_a_mutant_replaces_stands_once_in_its_function(mutant: mutants.Mutant) -> None:
    text = (mutants.ROOT / mutant.path).read_text()
    ast.parse(mutant.mutated(text))
    assert mutant.replace != mutant.find


def test_ids_differ_and_the_map_has_tests_of_each() -> None:
    assert len({mutant.id for mutant in FOUND}) == len(FOUND)
    assert RECORDED.keys() == {mutant.id for mutant in FOUND}, "scripts/mutants --map"
    assert [
        name for name, tests in RECORDED.items() if not any(mutants.exists(mutants.ROOT, each) for each in tests)
    ] == []


def test_a_mutant_that_fits_nowhere_or_twice_is_refused() -> None:
    text = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return (x + 1) * (x + 1)\n"
    fits = mutants.Mutant("m", "a.py", "f", "x + 1", "x")
    assert fits.mutated(text) == text.replace("return x + 1", "return x")
    for function in ("g", "h"):
        with pytest.raises(ValueError, match=r"stands 2 times|there is no h"):
            mutants.Mutant("m", "a.py", function, "x + 1", "x").mutated(text)


def test_a_probe_stands_before_its_statement() -> None:
    text = (
        "def f(x):\n    if x:\n        return 1\n"
        "    elif x > 2:\n        return (\n            3\n        )\n    return 4\n"
    )
    found = [mutants.Mutant(find, "a.py", "f", find, "") for find in ("1", "> 2", "3", "4")]
    probed = mutants.with_probes(text, found)
    namespace: dict[str, object] = {}
    exec(compile(probed, "probed", "exec"), namespace)
    lines = probed.splitlines()
    for mutant, after in zip(found, ("        return 1", "    if x:", "        return (", "    return 4"), strict=True):
        assert lines[lines.index(next(each for each in lines if f"hit({mutant.id!r})" in each)) + 1] == after


def test_a_process_that_a_test_starts_is_known_by_its_ancestors(tmp_path: Path) -> None:
    (tmp_path / f"test-{os.getpid()}").write_text("the test")
    script = "import mutants_probe; mutants_probe.hit('m')"
    (tmp_path / "mutants_folder.py").write_text(f"HITS = {str(tmp_path)!r}\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{mutants.ROOT / 'scripts'}"}
    subprocess.run(["sh", "-c", f'{sys.executable} -c "{script}"; true'], env=environment, timeout=60, check=True)
    assert (tmp_path / "hit-m").read_text() == "the test\n"
