"""Every code block of README.md and docs runs, or says why it does not (`tests.docs.blocks`).

The blocks of a page run in one folder, in the order of the page, with the files of given/common and of given/PAGE.
Python blocks go on from each other, after `given.py`; a console block is a session of bash, whose output is compared
line by line, numbers aside; YAML blocks are checked as job files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from smpkit.config.job import JobConfig
from smpkit.config.section import validated
from smpkit.testing import run_ranks
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, problem_of
from tests.docs.run_page import run_blocks

_GIVEN: Final = Path(__file__).parent / "given"
_DEADLINE_SECONDS: Final = 150
_WITH_CODE: Final = [page for page in PAGES if any(block.runs for block in blocks_of(page))]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removesuffix(".md")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_each_block_says_what_it_is(page: Path) -> None:
    assert [problem for block in blocks_of(page) if (problem := problem_of(block))] == []


@pytest.mark.parametrize("page", _WITH_CODE, ids=_name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    _run([block for block in blocks_of(page) if "slow" not in block.options], tmp_path)


_SLOW: Final = [page for page in _WITH_CODE if any("slow" in block.options for block in blocks_of(page))]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", _SLOW, ids=_name)
def test_all_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    _run(list(blocks_of(page)), tmp_path)


def _run(blocks: Sequence[Block], folder: Path) -> None:
    if not blocks:
        return
    for given in (_GIVEN / "common", _GIVEN / _name(blocks[0].page).removeprefix("docs/").replace("/", "-")):
        if given.is_dir():
            shutil.copytree(given, folder, dirs_exist_ok=True)
    if any("examples/" in block.text for block in blocks):
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("checkpoints", "runs"))
    for group in _groups(blocks):
        if group[0].file:
            (folder / group[0].file).write_text(group[0].text, encoding="utf-8")
        if group[0].language == "yaml":
            _check_job(group[0], folder)
        elif group[0].language == "console":
            _run_console(group[0], folder)
        elif not group[0].file:
            _run_python(group, folder)


def _groups(blocks: Sequence[Block]) -> list[list[Block]]:
    """Return what runs together: Python with the Python it goes on from, where that stands; all else by itself."""
    groups: list[list[Block]] = []
    open_group: list[Block] | None = None
    for block in blocks:
        if not block.runs:
            continue
        if block.language != "python" or block.file or "alone" in block.options or "def test_" in block.text:
            groups.append([block])
        elif open_group is None or block.given:
            open_group = [block]
            groups.append(open_group)
        else:
            open_group.append(block)
    return groups


# --- the three languages ----------------------------------------------------------------------------------------------


def _check_job(block: Block, folder: Path) -> None:
    """Check a job file, or a part of one, as `smpkit validate` would."""
    read: dict[str, Any] = yaml.safe_load(block.text)
    if "modelparallel" in read:
        read = {"distribution": {"smdistributed": read}}
    job = {"entry_point": "train.py", **read}
    validated(JobConfig, job, subject=block.place)
    (folder / "train.py").touch()


def _run_python(group: Sequence[Block], folder: Path) -> None:
    block, ranks = group[0], max(each.number("ranks", 1) for each in group)
    if "def test_" in block.text:
        (folder / "test_block.py").write_text(block.text, encoding="utf-8")
        _finish([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_block.py"], folder, block.place)
        return
    parts = [(_name(each.page), each.line, each.text) for each in group]
    if "alone" not in block.options:
        given = folder / (f"given_{block.given}.py" if block.given else "given.py")
        parts.insert(0, (given.name, 1, given.read_text(encoding="utf-8")))
    run_ranks(run_blocks, ranks, parts, folder, _variables(folder))


def _run_console(block: Block, folder: Path) -> None:
    commands = list(_commands(block.text))
    marks = [f"echo '@@ {n}'\n{_found(command)}" for n, (command, _) in enumerate(commands)]
    exits = block.number("exits", 0)
    said = _finish(["bash", "-euc", "\n".join(marks)], folder, block.place, exits)
    answers = re.split(r"^@@ \d+\n", said, flags=re.MULTILINE)[1:]
    if "any output" in block.options:
        return
    for (command, shown), answer in zip(commands, answers, strict=True):
        missing = _first_missing(shown, answer, drawn="timeline" not in command)
        assert missing is None, f"{block.place}: `{command}` does not say\n{missing}\nbut\n{answer}"


def _found(command: str) -> str:
    """Return a command with the names of this run's temporary folders, where the page has those of another."""
    return re.sub(r"/tmp/(smpkit-[\w-]+-)\w{8}\b", r'"$(echo "$TMPDIR"/\1*)"', command)


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a session, and the lines of output that are shown."""
    command = ""
    shown: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif command.endswith("\\") and not shown:
            command += f"\n{line}"
        else:
            shown.append(line)
    if command:
        yield command, shown


def _first_missing(shown: Sequence[str], answer: str, *, drawn: bool) -> str | None:
    """Return the first shown line that the answer does not have, after those before it; None if there is none.

    Args:
        drawn: compare drawings of stages, too; how long actions take differs from run to run.
    """

    def compared(line: str) -> str:
        return _plain(line if drawn else re.sub(r"^(stage \d+) .*", r"\1", line))

    lines = iter([compared(line) for line in answer.splitlines()])
    for line in shown:
        if line.strip() not in ("", "...") and compared(line) not in lines:
            return line
    return None


def _plain(line: str) -> str:
    """Return a line without what differs from run to run: numbers, temporary names, and how far things are apart.

    Where a part of the model lies does not differ.
    """
    if re.fullmatch(r"\[rank 0\]   [\w.]+: \d+", line):
        return line
    line = re.sub(r"/\S*?smpkit-[\w-]+|(?<=\")/\S*/", "/X", line)
    line = re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?", "#", line)
    return re.sub(r"[\s─━]+", " ", re.sub(r"\b(ms|s|µs|KiB|MiB|GiB|B)\b", "u", line)).strip()


def _finish(command: Sequence[str], folder: Path, place: str, exits: int = 0) -> str:
    """Run a command in the folder; return what it says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SM_", "SMPKIT"))}
    environment |= {
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "estimator", ROOT / "container"))),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "TMPDIR": str(folder),
    }
    environment |= _variables(folder)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == exits, f"{place}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def _variables(folder: Path) -> dict[str, str]:
    """Return the environment variables that given/PAGE asks for."""
    file = folder / "variables"
    lines = file.read_text(encoding="utf-8").split() if file.is_file() else []
    return dict(line.split("=", 1) for line in lines)
