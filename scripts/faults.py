"""Make each fault of tests/faults.yaml, one at a time, and see that the test named for it notices.

This happens in worktrees of what git knows, changes included that are not committed yet. A fault is killed only if its
test passes on the unchanged tree and fails with the fault.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

import yaml

from tests.leftovers import kill_processes_with

ROOT: Final = Path(__file__).resolve().parents[1]
_LIMIT_SECONDS: Final = 900
"""For each test, which hangs then: that is no kill, as it would be if pytest's own limit ended it."""


class Fault(NamedTuple):
    """A mistake: in `file`, `find` becomes `replace`; `was` names the commit or the review that tells of the bug."""

    id: str
    file: str
    find: str
    replace: str
    killed_by: str
    was: str = ""


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests with a tree's code, also in what they start, and return pytest's exit status and what it wrote."""
    code = os.pathsep.join(map(str, (tree, tree / "estimator", tree / "container")))
    environ = {**os.environ, "PYTHONPATH": code, "FAULTS_TREE": str(tree)}
    options = ["-q", "-rA", "-p", "no:cacheprovider", "-o", "timeout=0", f"--basetemp={tree}.tests"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    limited = ["timeout", "--signal=KILL", str(_LIMIT_SECONDS * len(tests)), *command]
    with tempfile.TemporaryFile("w+") as output:
        try:
            status = subprocess.run(limited, cwd=tree, env=environ, stdout=output, check=False).returncode
        finally:
            kill_processes_with(f"FAULTS_TREE={tree}")  # what tests have left running
        output.seek(0)
        return status, output.read()


def passing(tree: Path, killers: Sequence[str]) -> set[str]:
    """Return those that pass on the unchanged tree; they run together, which is faster, unless one of them fails."""
    status, output = run_tests(tree, killers)
    if status != 0 and len(killers) > 1:
        return {test for killer in killers for test in passing(tree, [killer])}
    return {killer for killer in killers if status == 0 and f"\nPASSED {killer}" in output}


def outcome(tree: Path, fault: Fault) -> str:
    """Return what becomes of a fault whose killer passes without it; the tree is unchanged again afterwards."""
    path = tree / fault.file
    text = path.read_text()
    if (count := text.count(fault.find)) != 1:
        return f"ERROR: the text to replace stands {count} times in {fault.file}"
    path.write_text(text.replace(fault.find, fault.replace))
    status, output = run_tests(tree, [fault.killed_by])
    path.write_text(text)
    return {0: "SURVIVED", 1: "killed"}.get(status, f"ERROR: pytest exits {status}: {output[-2000:]}")


def judge(trees: SimpleQueue[Path], faults: Sequence[Fault]) -> int:
    """Say what becomes of faults whose killers are in one file, and return how many are killed."""
    tree, count = trees.get(), 0
    passed = passing(tree, list(dict.fromkeys(fault.killed_by for fault in faults)))
    for fault in faults:
        missing = f"ERROR: {fault.killed_by} does not exist, or does not pass on the unchanged tree"
        result = outcome(tree, fault) if fault.killed_by in passed else missing
        print(f"{fault.id:36} {result}", flush=True)
        count += result == "killed"
    trees.put(tree)
    return count


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="these faults only")
    parser.add_argument("--in", dest="folder", default="", help="only those in files whose path begins so")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    asked = parser.parse_args()
    known = [Fault(**fault) for fault in yaml.safe_load((ROOT / "tests/faults.yaml").read_text())]
    by_id = {fault.id: fault for fault in known if fault.file.startswith(asked.folder)}
    chosen = [fault for key, fault in by_id.items() if not asked.ids or key in asked.ids]
    if not chosen or not {*asked.ids} <= by_id.keys() or len({fault.id for fault in known}) < len(known):
        parser.error("there are no such faults, or two have one id")
    together: defaultdict[str, list[Fault]] = defaultdict(list)
    for fault in chosen:
        together[fault.killed_by.partition("::")[0]].append(fault)
    git = partial(subprocess.run, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    changed = git(["git", "stash", "create"]).stdout.strip() or "HEAD"
    trees: SimpleQueue[Path] = SimpleQueue()
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(asked.jobs) as pool:
            for number in range(asked.jobs):
                git(["git", "worktree", "add", "--quiet", "--detach", f"{folder}/{number}", changed])
                trees.put(Path(folder, str(number)))
            killed = sum(pool.map(partial(judge, trees), together.values()))
    finally:
        git(["git", "worktree", "prune"])
    print(f"{killed} of {len(chosen)} faults are killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
