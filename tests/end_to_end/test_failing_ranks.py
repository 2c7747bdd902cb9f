"""A job whose rank fails under smpkit's runtime ends within seconds, with one story."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = f"""
    import os, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    import torch
    from torch import nn
    import smpkit.torch as smp

    from tests.deadlines import let_judge, wait_shortly

    smp.init()
    model = smp.DistributedModel(nn.Linear(4, 1))

    @smp.step
    def train_step(model, x):
        model.backward(model(x).sum())

    def fail(how):
        if how == "raise":
            raise ValueError("hidden size 2050 is not divisible by 4")
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "hang":
            time.sleep(300)
        if how == "leave":
            sys.exit(0)

    for step in range(100):
        train_step(model, torch.ones(2, 4))
        if step == 3 and smp.rank() == 1:
            fail(sys.argv[-1])
        if step == 3 and sys.argv[-1] == "hang":
            let_judge(0, [])
            wait_shortly()
"""

JOB = """
    entry_point: train.py
    distribution:
      smdistributed: {modelparallel: {enabled: true, parameters: {ddp: true, microbatches: 2}}}
      torch_distributed: {enabled: true, processes_per_host: 2}
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["(rank 1, exit 1)", "ValueError: hidden size 2050", "rank 0 stopped"]),
        ("kill", ["(rank 1, exit 137)", "killed by SIGKILL"]),
        ("hang", ["the reduction of gradients (bucket 0) for rank 1", "rank 1 was still running, here:"]),
        ("leave", ["rank 1"]),
    ],
)
@pytest.mark.slow
def test_the_first_failing_rank_is_named_and_its_story_told_once(tmp_path: Path, how: str, expected: list[str]) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "job.yaml").write_text(textwrap.dedent(JOB))
    done = subprocess.run(
        [sys.executable, "-m", "smpkit", "run", str(tmp_path / "job.yaml"), "--", how],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 1
    for text in expected:
        assert text in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") <= 1, done.stderr
    assert "GLHF" not in done.stderr
    shown = [line for line in done.stderr.splitlines() if line.strip().startswith('File "')]
    assert all("train.py" in line for line in shown), done.stderr  # no line of smpkit's or torch's
