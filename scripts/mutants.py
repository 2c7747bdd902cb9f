"""Break the runtime on purpose, fault by fault, and see that tests notice.

A mutant is a realistic fault: in `function` of a file of smpkit/torch, `find` becomes `replace` (tests/mutants.yaml).
Which tests run its lines is recorded in tests/mutants_map.json by `--map`, which runs the default suite once with a
probe before each of these lines. All this happens in copies of the tree, each with a small environment of its own
whose packages are those of .venv, so that processes which tests start import the copy, too.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from tests.leftovers import kill_processes_with

ROOT: Final = Path(__file__).resolve().parents[1]
RUNTIME: Final = "smpkit/torch"
LIST: Final = "tests/mutants.yaml"
MAP: Final = "tests/mutants_map.json"
_PROBE: Final = "scripts/mutants_probe.py"
_MOST_TESTS: Final = 12
_MOST_TRIED: Final = 30
"""Of a mutant that no test is known to kill."""
_MOST_SECONDS: Final = 100.0
"""Of a mutant's tests together, after which no further one is added."""
_LIMIT_SECONDS: Final = 300
"""After which a mutant's tests count as hanging."""


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    id: str
    file: str
    function: str
    find: str
    replace: str

    @property
    def path(self) -> str:
        return f"{RUNTIME}/{self.file}"

    def places(self, text: str) -> list[int]:
        """Return where in the source of its file the text to replace stands, inside of the function."""
        start, end = _span(ast.parse(text), text, self.function)
        found, places = text.find(self.find, start, end), []
        while found >= 0:
            places.append(found)
            found = text.find(self.find, found + 1, end)
        return places

    def mutated(self, text: str) -> str:
        """Return the source with the fault.

        Raises:
            ValueError: the text to replace does not stand in the function, or more than once.
        """
        places = self.places(text)
        if len(places) != 1:
            raise ValueError(f"{self.id}: `{self.find}` stands {len(places)} times in {self.function} of {self.path}")
        return text[: places[0]] + self.replace + text[places[0] + len(self.find) :]


def mutants(root: Path = ROOT) -> list[Mutant]:
    """Return all mutants."""
    return [Mutant(**each) for each in yaml.safe_load((root / LIST).read_text())]


def _span(tree: ast.AST, text: str, function: str) -> tuple[int, int]:
    """Return where a function, by its qualified name, begins and ends in the source.

    Raises:
        ValueError: there is no such function.
    """
    for name in function.split("."):
        below = [each for each in ast.iter_child_nodes(tree) if getattr(each, "name", None) == name]
        if not below:
            raise ValueError(f"there is no {function}")
        tree = below[-1]  # of a property, the setter comes last
    assert isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    assert tree.end_lineno is not None
    starts = _line_starts(text)
    return starts[tree.lineno - 1], starts[tree.end_lineno]


def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


# --- probes -----------------------------------------------------------------------------------------------------------


def with_probes(text: str, found: Sequence[Mutant]) -> str:
    """Return the source of a file with a probe before the statement of each mutant."""
    tree, starts = ast.parse(text), _line_starts(text)
    lines = text.splitlines(keepends=True)
    probes: defaultdict[int, list[str]] = defaultdict(list)
    for mutant in found:
        [place] = mutant.places(text)
        line = sum(start <= place for start in starts)
        probes[_statement_line(tree, lines, line)].append(mutant.id)
    for number in sorted(probes, reverse=True):
        indent = lines[number - 1][: len(lines[number - 1]) - len(lines[number - 1].lstrip())]
        calls = [f"{indent}__import__('mutants_probe').hit({name!r})\n" for name in probes[number]]
        lines[number - 1 : number - 1] = calls
    return "".join(lines)


def _statement_line(tree: ast.AST, lines: Sequence[str], line: int) -> int:
    """Return the line of the innermost statement around a line, before which another statement may stand."""
    around = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.stmt) and each.end_lineno is not None and each.lineno <= line <= each.end_lineno
    ]
    around.sort(key=lambda each: (each.lineno, -(each.end_lineno or 0)))
    while lines[around[-1].lineno - 1].lstrip().startswith("elif "):
        around.pop()
    return around[-1].lineno


def make_map(only: Sequence[str], selection: Sequence[str]) -> int:
    """Run the default suite with probes and record which tests run which mutant's lines.

    Args:
        only: the mutants to do this for; all if empty.
        selection: arguments of pytest, to run less than all; a mutant that none of it runs keeps the tests it had.
    """
    everyone = mutants()
    listed = [mutant for mutant in everyone if not only or mutant.id in only]
    before: dict[str, list[str]] = json.loads((ROOT / MAP).read_text())
    with _copy() as tree, tempfile.TemporaryDirectory(prefix="mutants-hits-") as hits:
        by_path: defaultdict[str, list[Mutant]] = defaultdict(list)
        for mutant in listed:
            by_path[mutant.path].append(mutant)
        for path, found in by_path.items():
            (tree / path).write_text(with_probes((tree / path).read_text(), found))
        shutil.copy(tree / _PROBE, _site_packages(tree))
        (_site_packages(tree) / "mutants_folder.py").write_text(f"HITS = {hits!r}\n")
        workers = os.environ.get("SMPKIT_TEST_WORKERS", "2")
        command = ["-m", "pytest", "-q", "-p", "mutants_probe", "-n", workers, "--dist", "worksteal"]
        command += ["-m", "not slow and not docker", "-o", f"cache_dir={hits}/cache", "--basetemp", f"{hits}/tests"]
        command += selection
        subprocess.run([_python(tree), *command], cwd=tree, env=_environment(tree), check=False)
        found_now = _recorded(Path(hits), listed)
    kept = before if selection or only else {}
    recorded = {mutant.id: found_now.get(mutant.id) or kept.get(mutant.id, []) for mutant in everyone}
    (ROOT / MAP).write_text(json.dumps(recorded, indent=1) + "\n")
    missing = [name for name, tests in recorded.items() if not tests]
    print(f"{len(recorded) - len(missing)} of {len(recorded)} mutants are run by tests", *missing)
    return 1 if missing else 0


def _recorded(hits: Path, listed: Sequence[Mutant]) -> dict[str, list[str]]:
    """Return the tests of each mutant, fastest first: only those that passed without the fault.

    Of many, the fastest ones of each file are taken, most of them of the files of the mutant's own room, and parameters
    of a test that is there already come last.
    """
    seconds: dict[str, float] = {}
    for file in hits.glob("passed-*"):
        for line in file.read_text().splitlines():
            text, test = line.split(" ", 1)
            seconds[test] = float(text)
    whole: defaultdict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        whole[test.partition("::")[0]] += taken
    known = {**whole, **seconds}
    recorded = {}
    for mutant in listed:
        file = hits / f"hit-{mutant.id}"
        tests = set(file.read_text().splitlines()) if file.exists() else set()
        chosen: list[str] = []
        in_order = sorted(tests & known.keys(), key=lambda test: (known[test], test))
        for test in _from_many_files(in_order, f"/{mutant.file.partition('/')[0].removesuffix('.py')}"):
            total = sum(known[each] for each in chosen)
            if len(chosen) < _MOST_TRIED and (not chosen or total + known[test] <= _MOST_SECONDS):
                chosen.append(test)
        chosen.sort(key=lambda test: (known[test], test))
        recorded[mutant.id] = chosen
    return recorded


def _from_many_files(tests: Sequence[str], room: str) -> list[str]:
    """Return tests in turns: first the first of the first function of each file, and so on; of those of a room four."""
    turns: dict[str, tuple[int, int]] = {}
    functions: defaultdict[str, int] = defaultdict(int)
    files: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for test in tests:
        function, file = test.partition("[")[0], test.partition("::")[0]
        place = files[file].setdefault(function, len(files[file]))
        turns[test] = functions[function], place // (4 if room in file else 1)
        functions[function] += 1
    return sorted(tests, key=turns.__getitem__)


# --- copies of the tree -----------------------------------------------------------------------------------------------


@contextmanager
def _copy() -> Iterator[Path]:
    """Make a copy of what git knows or would add, with an environment of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "smpkit"
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        _make_environment(tree)
        yield tree


def _make_environment(tree: Path) -> None:
    """Make `.venv` in a copy: links to what is installed in ours, and the copy in place of our tree."""
    ours, theirs = Path(sys.prefix), tree / ".venv"
    packages = _site_packages(tree)
    packages.mkdir(parents=True)
    for each in ours.iterdir():
        if each.name not in ("bin", "lib", "lib64", "pyvenv.cfg"):
            (theirs / each.name).symlink_to(each)
    shutil.copy(ours / "pyvenv.cfg", theirs)
    for each in next((ours / "lib").glob("python*/site-packages")).iterdir():
        if each.suffix == ".pth" and str(ROOT) in each.read_text():
            (packages / each.name).write_text(each.read_text().replace(str(ROOT), str(tree)))
        else:
            (packages / each.name).symlink_to(each)
    (theirs / "bin").mkdir()
    for each in (ours / "bin").iterdir():
        target = theirs / "bin" / each.name
        if each.is_symlink():
            target.symlink_to(each.resolve() if each.name.startswith("python") else each)
        elif each.is_file() and each.read_bytes()[:2] == b"#!":
            target.write_bytes(each.read_bytes().replace(str(ours).encode(), str(theirs).encode()))
            target.chmod(0o755)
        else:
            target.symlink_to(each)


def _site_packages(tree: Path) -> Path:
    return tree / ".venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _python(tree: Path) -> str:
    return str(tree / ".venv" / "bin" / "python")


def _environment(tree: Path) -> dict[str, str]:
    binaries = tree / ".venv" / "bin"
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "VIRTUAL_ENV": str(binaries.parent)}


# --- the check --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a mutant's tests said; `killer` is the one that failed, if it is known."""

    verdict: str
    detail: str
    seconds: float
    killer: str | None = None


def run_mutant(tree: Path, mutant: Mutant, tests: Sequence[str]) -> Outcome:
    """Run a mutant's tests in a copy of the tree, which is whole again afterwards."""
    began = time.monotonic()
    path = tree / mutant.path
    before = path.read_text()
    tests = [test for test in tests if exists(tree, test)]
    if not tests:
        return Outcome("unknown", "no test runs its lines, as far as the map says: scripts/mutants --map", 0.0)
    path.write_text(mutant.mutated(before))
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-tests-") as folder:
            options = ["-q", "-x", "-p", "no:cacheprovider", "--basetemp", f"{folder}/tests", "-rfE"]
            status, said = _run([_python(tree), "-m", "pytest", *options, *tests], tree)
            if status == 4:  # the parameters of a test are others now: run it with all of them
                names = list(dict.fromkeys(test.partition("[")[0] for test in tests))
                status, said = _run([_python(tree), "-m", "pytest", *options, *names], tree)
    finally:
        path.write_text(before)
    seconds = time.monotonic() - began
    if status is None:
        return Outcome("killed", f"hangs for {_LIMIT_SECONDS} s", seconds)
    if status == 0:
        return Outcome("SURVIVED", f"{len(tests)} tests pass", seconds)
    if status == 1:
        failed = [line.split(" ", 1)[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if not failed:
            return Outcome("killed", "a test failed", seconds)
        return Outcome("killed", failed[0][:200], seconds, next((test for test in tests if test in failed[0]), None))
    return Outcome("unknown", "pytest could not run: " + " ".join(said.split()[-40:]), seconds)


def exists(tree: Path, test: str) -> bool:
    """Return whether a tree has a test, or a file of tests, whatever its parameters."""
    file, _, name = test.partition("::")
    function = name.partition("[")[0].rpartition("::")[2]
    return (tree / file).is_file() and (not name or f"def {function}(" in (tree / file).read_text())


def _run(command: Sequence[str], tree: Path) -> tuple[int | None, str]:
    """Return a command's exit status, or None if it took too long, and its output; nothing it started is left."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=_environment(tree), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_processes_with(f"VIRTUAL_ENV={tree}/.venv")  # whatever has become of their parents
            process.wait()
        output.seek(0)
        return status, output.read()


def check(only: Sequence[str], jobs: int) -> int:
    """Run mutants, some at a time, and say of each what became of it."""
    listed = mutants()
    if unknown := sorted(set(only) - {mutant.id for mutant in listed}):
        print("there is no mutant", *unknown, file=sys.stderr)
        return 2
    recorded: dict[str, list[str]] = json.loads((ROOT / MAP).read_text())
    chosen = [mutant for mutant in listed if not only or mutant.id in only]
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def outcome(mutant: Mutant) -> Outcome:
        tree = trees.get()
        try:
            return run_mutant(tree, mutant, recorded.get(mutant.id, ()))
        finally:
            trees.put(tree)

    bad, killers = 0, dict[str, str]()
    with _copies(jobs) as copies, ThreadPoolExecutor(jobs) as pool:
        for tree in copies:
            trees.put(tree)
        for mutant, result in zip(chosen, pool.map(outcome, chosen), strict=True):
            bad += result.verdict != "killed"
            if result.killer is not None:
                killers[mutant.id] = result.killer
            print(f"{result.verdict:8} {mutant.id:40} {result.seconds:5.0f} s  {result.detail}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants killed")
    recorded = json.loads((ROOT / MAP).read_text())  # another run may have written meanwhile
    for name, killer in killers.items():  # first next time, and others only in case that it changes
        recorded[name] = [killer, *(test for test in recorded[name] if test != killer)][:_MOST_TESTS]
    (ROOT / MAP).write_text(json.dumps(recorded, indent=1) + "\n")
    return 1 if bad else 0


@contextmanager
def _copies(count: int) -> Iterator[list[Path]]:
    if count == 0:
        yield []
        return
    with _copy() as tree, _copies(count - 1) as others:
        yield [tree, *others]


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--map",
        nargs=argparse.REMAINDER,
        metavar="PYTEST-ARGUMENT",
        help="find out anew which tests run which mutant's lines",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these mutants only")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants run at a time")
    arguments = parser.parse_args()
    if arguments.map is not None:
        return make_map(arguments.only, arguments.map)
    return check(arguments.only, arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
