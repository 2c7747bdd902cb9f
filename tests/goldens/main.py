"""Compare what must not change with what is recorded, or with what another commit gives on this machine.

Exit status: 0 nothing has changed, 1 something has, 2 something could not be compared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.goldens.items import Part, Recording, differences, lowered
from tests.goldens.parts import PARTS

__all__ = ["compare", "main"]

ROOT = Path(__file__).parents[2]
_FOLDER = "tests/goldens"
_PATHS = (".", "estimator", "container")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/goldens", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help="choose parts, also those off by default"
    )
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--write", action="store_true", help="record what the code gives now")
    parser.add_argument(
        "--against",
        metavar="GITREF",
        help="compare with what this commit gives on this machine, not with what is recorded",
    )
    parser.add_argument("--collect", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        for part in PARTS.values():
            print(f"{part.name:9} {part.about}{'' if part.default else ' (only if asked for)'}")
        return 0
    parts = [PARTS[name] for name in options.only or [name for name, part in PARTS.items() if part.default]]
    if options.collect is not None:
        options.collect.write_text(parts[0].record().dump(), encoding="utf-8")
        return 0
    return max(_do(part, write=options.write, against=options.against) for part in parts)


def _do(part: Part, *, write: bool, against: str | None) -> int:
    """Compare one part, or record it, and say which was done."""
    started = time.monotonic()
    now = part.record()
    if write:
        part.path.parent.mkdir(exist_ok=True)
        part.path.write_text(now.without_detail().dump(), encoding="utf-8")
        _say(part, f"{len(now.items)} items recorded", started)
        return 0
    if against is not None:
        before, other = _at(against, part), f"commit {_git('rev-parse', '--short', against)} on this machine"
    else:
        before, other = Recording.load(part.path.read_text(encoding="utf-8")), "what is recorded"
        if before.machine != now.machine:
            return _not_compared(part, before, now, started)
    status, report = compare(part, before, now)
    for line in report:
        print(line)
    word = f"{len(now.items)} items as in {other}" if status == 0 else f"differs from {other}"
    _say(part, word, started)
    return status


def compare(part: Part, before: Recording, now: Recording) -> tuple[int, list[str]]:
    """Return the exit status and what there is to say."""
    changed = differences(part, before.items, now.items)
    better = [f"better: {line}" for line in lowered(part, before.items, now.items)]
    return (1 if changed else 0), [*better, *changed]


def _not_compared(part: Part, before: Recording, now: Recording, started: float) -> int:
    for key in sorted({*before.machine, *now.machine}):
        old, new = before.machine.get(key), now.machine.get(key)
        if old != new:
            print(f"{part.name}: recorded with {key} {old!r}, this machine has {new!r}")
    commit = _git("log", "-1", "--format=%h", "--", str(part.path.relative_to(ROOT))) or "COMMIT"
    print(f"hint: scripts/goldens --only {part.name} --against {commit} compares with that commit on this machine")
    _say(part, "NOT COMPARED: what is recorded does not hold for this machine", started)
    return 2


def _at(ref: str, part: Part) -> Recording:
    """Return what a commit gives with this interpreter; with its own goldens, which know its modules, if it has any."""
    with tempfile.TemporaryDirectory(prefix="smpkit-goldens.") as folder:
        root = Path(folder) / "tree"
        root.mkdir()
        archive = subprocess.run(["git", "archive", ref], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x"], cwd=root, input=archive, check=True)
        if not (root / _FOLDER).is_dir():
            subprocess.run(["cp", "-r", str(ROOT / _FOLDER), str(root / _FOLDER)], check=True)
        found = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", "tests.goldens.main", "--only", part.name, "--collect", str(found)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(root / path) for path in _PATHS)},
            check=True,
        )
        return Recording.load(found.read_text(encoding="utf-8"))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()


def _say(part: Part, what: str, started: float) -> None:
    print(f"{part.name}: {what} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
