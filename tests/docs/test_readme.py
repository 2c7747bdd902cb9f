"""README.md and docs/index.md: their script before and after the change, how it is started, and figures they quote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks_of

README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
MOST_LINES = 80


def script(side: str) -> str:
    """Return the script of the page, before (`-`) or after (`+`) the change."""
    [diff] = [block.text for block in blocks_of(README) if block.language == "diff"]
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[:1] in (side, " ", "\n"))


def loss_of(output: str) -> set[str]:
    return set(re.findall(r"loss (\d+\.\d{4})", output))


def run(folder: Path, *arguments: str) -> str:
    """Run Python in a folder; return what it said."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def commands(page: Path, starting: str) -> list[str]:
    """Return the words of the command on a page that begins so."""
    lines = [line for block in blocks_of(page) for line in block.text.splitlines() if line.startswith(f"$ {starting}")]
    return lines[0].removeprefix("$ ").partition("#")[0].split()


def test_both_pages_show_one_script() -> None:
    [shown] = [block.text for block in blocks_of(INDEX) if block.language == "python"]
    assert re.sub(r"\n+", "\n", shown).replace("  # not loss.backward()", "") == script("+")
    assert commands(README, "smpkit run train.py") == commands(INDEX, "smpkit run train.py")
    [numbers] = re.findall(r'hl_lines="([\d ]+)"', INDEX.read_text(encoding="utf-8"))
    marked = [shown.splitlines()[int(number) - 1].split("  #")[0] for number in numbers.split()]
    before = script("-").splitlines()
    assert marked == [line.split("  #")[0] for line in script("+").splitlines() if line not in before]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_trains_as_before_over_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(script("-"), encoding="utf-8")
    (tmp_path / "train.py").write_text(script("+"), encoding="utf-8")
    plain = run(tmp_path, "plain.py")
    cut = run(tmp_path, "-m", *commands(README, "smpkit run train.py"))
    assert "pipeline 2 × tensor 1 × data 1" in cut
    assert loss_of(plain) == loss_of(cut)
    assert len(loss_of(cut)) == 1
    report = json.loads(run(tmp_path, "-m", "smpkit", "report", "--json"))
    assert [curve["name"] for curve in report["curves"]] == ["loss"]
    (tmp_path / "plain.py").unlink()
    for command in ("smpkit init", "smpkit plan job.yaml"):
        run(tmp_path, "-m", *commands(INDEX, command))
    assert loss_of(run(tmp_path, "-m", *commands(INDEX, "smpkit run job.yaml"))) == loss_of(plain)
    [told] = re.findall(r"The degrees go into the script: `(smp\.init\(.*?\))`", INDEX.read_text(encoding="utf-8"))
    (tmp_path / "train.py").write_text(script("+").replace("smp.init()", told), encoding="utf-8")
    torchrun = run(tmp_path, "-m", "torch.distributed.run", *commands(INDEX, "torchrun")[1:])
    assert loss_of(torchrun) == loss_of(plain)


def test_the_page_stays_short() -> None:
    assert README in PAGES
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_figures_are_those_that_were_measured() -> None:
    figures = json.loads((ROOT / "benchmarks/results/cpu/quoted.json").read_text(encoding="utf-8"))["figures"]
    [text] = re.findall(r"## Measured.*?(?=## )", README.read_text(encoding="utf-8"), re.DOTALL)
    for figure in figures:
        ours, other = figure["measured"]
        shown = f"{1 - ours / other:.0%}".replace("%", " %") if "%" in figure["quoted"] else f"{ours / other:.2f} ×"
        assert figure["quoted"] == shown
        assert shown in text
    assert re.findall(r"[\d.]+ [×%]", text) == [figure["quoted"] for figure in figures]
    assert len(re.findall(r"^- ", text, re.MULTILINE)) == 3


def test_claims_name_tests_that_are_there() -> None:
    named = re.findall(r"(?:<!-- |, )(tests/[\w/.]+|test_\w+\.py)", README.read_text(encoding="utf-8"))
    assert len(named) > 5
    missing = [name for name in named if not list(ROOT.glob(name if "/" in name else f"tests/*/{name}"))]
    assert missing == []
