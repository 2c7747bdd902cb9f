"""`smpkit.testing.run_ranks`, used as its page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smpkit.testing.ranks import RankFailed
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def rank_of_world() -> tuple[str, str, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["EXTRA"]


def test_each_rank_has_its_environment_and_returns_its_value() -> None:
    assert run_ranks(rank_of_world, 2, env={"EXTRA": "x"}) == [("0", "2", "x"), ("1", "2", "x")]


def fail(how: str) -> None:
    if os.environ["RANK"] == "1":
        if how == "raises":
            raise ValueError("no such column")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "story"), [("raises", "ValueError: no such column"), ("dies", "exit code -9")])
def test_a_failure_has_the_ranks_story(how: str, story: str) -> None:
    with pytest.raises(RankFailed, match=rf"--- rank 1: (.|\n)*{story}"):
        run_ranks(fail, 2, how)


def stand_still() -> None:
    time.sleep(60)


def test_a_rank_that_hangs_is_killed() -> None:
    with pytest.raises(RankFailed, match="rank 0: still running after 1 s"):
        run_ranks(stand_still, 1, timeout=1)


def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/test-without-a-cloud.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "test_page.py").write_text(next(block for block in blocks if "run_ranks" in block))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
