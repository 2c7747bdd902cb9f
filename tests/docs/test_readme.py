"""What README.md claims: its script, before and after the change, and the figures that it quotes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks_of

README = ROOT / "README.md"
MOST_LINES = 80


def script(side: str) -> str:
    """Return the script of the page, before (`-`) or after (`+`) the change."""
    [diff] = [block.text for block in blocks_of(README) if block.language == "diff"]
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[:1] in (side, " ", "\n"))


def loss_of(output: str) -> set[str]:
    return set(re.findall(r"loss (\d+\.\d{4})", output))


@pytest.mark.slow
def test_the_script_trains_as_before_over_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(script("-"), encoding="utf-8")
    (tmp_path / "train.py").write_text(script("+"), encoding="utf-8")
    [shown] = [block.text for block in blocks_of(README) if "smpkit run train.py" in block.text]
    command = shown.splitlines()[0].partition("#")[0].removeprefix("$ smpkit ").split()
    plain, cut = (
        subprocess.run([sys.executable, *each], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
        for each in (["plain.py"], ["-m", "smpkit", *command])
    )
    assert (plain.returncode, cut.returncode) == (0, 0), cut.stderr
    assert "pipeline 2 × tensor 1 × data 1" in cut.stderr
    assert loss_of(plain.stdout) == loss_of(cut.stdout)
    assert len(loss_of(cut.stdout)) == 1
    report = subprocess.run(
        [sys.executable, "-m", "smpkit", "report", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [curve["name"] for curve in json.loads(report.stdout)["curves"]] == ["loss"]


def test_the_page_stays_short() -> None:
    assert README in PAGES
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
