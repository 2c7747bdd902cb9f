"""Scripts composed by chance give what plain PyTorch gives, also when they go on from a checkpoint elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from tests.compat.commands import run_on_ranks
from tests.compat.random_scripts import SAVED, Drawn, Job, draw

FEW = (7, 34, 36)
MANY = range(100, 130)


def _run(drawn: Drawn, job: Job, folder: Path, resume: int) -> dict[str, Any]:
    (folder / "train.py").write_text(drawn.script())
    report = folder / f"report{resume}.json"
    given = ("--start", str(folder / "start.pt"), "--folder", str(folder / "checkpoints"), "--report", str(report))
    run_on_ranks(str(folder / "train.py"), "--resume", str(resume), *given, ranks=job.ranks, parameters=job.parameters)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def _compare(drawn: Drawn, folder: Path) -> None:
    plain: dict[str, Any] = {}
    state = torch.get_rng_state()
    exec(compile(drawn.reference(), "reference.py", "exec"), plain)
    torch.set_rng_state(state)
    first = _run(drawn, drawn.first, folder, 0)
    second = _run(drawn, drawn.second, folder, 1)
    without_masters = drawn.checkpoint == "full" and drawn.half
    if drawn.second == drawn.first and not without_masters:
        found, expected = (
            [*report["losses"][start:], *([report["validation"]] if drawn.counts_batches_once else [])]
            for report, start in ((second, 0), (first, SAVED))
        )
        if drawn.repeats_to_the_bit(drawn.first):
            assert found == expected
        else:
            assert [mean(each) for each in found] == pytest.approx([mean(each) for each in expected], rel=1e-4)
    for job, report, losses in [(drawn.first, first, plain["losses"]), (drawn.second, second, plain["losses"][SAVED:])]:
        tolerance = 0.05 if without_masters and report is second else drawn.tolerance(job)
        if tolerance:
            assert [mean(each) for each in report["losses"]] == pytest.approx(
                [mean(each) for each in losses], rel=tolerance
            )
        else:
            assert report["losses"] == losses
        if drawn.same_validation(job):
            assert mean(report["validation"]) == pytest.approx(plain["validation"][0], rel=tolerance or 1e-6)


def check(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, most_ranks: int = 4) -> None:
    """Run a seed's script and compare; a failure shows the script, and how to run it alone."""
    monkeypatch.chdir(folder)
    drawn = draw(seed, most_ranks)
    try:
        _compare(drawn, folder)
    except Exception as error:
        raise AssertionError(f"{error}\n\n{drawn.alone()}\n{drawn.script()}") from error


@pytest.mark.parametrize("seed", FEW)
def test_a_random_script(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_many_random_scripts(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, tmp_path, monkeypatch, most_ranks=8 if seed % 5 == 0 else 4)
