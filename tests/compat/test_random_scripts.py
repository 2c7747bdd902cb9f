"""Scripts composed by chance give what plain PyTorch gives, also when they go on from a checkpoint elsewhere."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from tests.compat.commands import run_on_ranks
from tests.compat.random_scripts import Drawn, Job, draw

FEW = (85, 93, 108)
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
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's nested tensors are a prototype
        exec(compile(drawn.reference(), "reference.py", "exec"), plain)
    torch.set_rng_state(state)
    reports = [_run(drawn, job, folder, resume) for resume, job in enumerate(drawn.jobs)]
    without_masters = drawn.checkpoint == "full" and drawn.half
    if drawn.second == drawn.first and not without_masters:
        kinds = ["losses", "validation"] if drawn.repeats_validation(drawn.first) else ["losses"]
        for (before, after), kind in product(pairwise(reports), kinds):
            expected = _last(after[kind], before[kind])
            if drawn.repeats_to_the_bit(drawn.first):
                assert after[kind] == expected
            else:
                assert _means(after[kind]) == pytest.approx(_means(expected), rel=1e-4)
    tolerance = 0.0
    for job, report in zip(drawn.jobs, reports, strict=True):
        # A job goes on from what the ones before have rounded.
        tolerance = max(tolerance, 0.05 if without_masters and report is not reports[0] else drawn.tolerance(job))
        losses = _last(report["losses"], plain["losses"])
        if tolerance:
            assert _means(report["losses"]) == pytest.approx(_means(losses), rel=tolerance)
        else:
            assert report["losses"] == losses
        if not drawn.settings["DROPOUT"]:
            assert report["norms"] == pytest.approx(_last(report["norms"], plain["norms"]), rel=10 * tolerance or 1e-5)
        if drawn.same_validation(job):
            validation = _means(_last(report["validation"], plain["validation"]))
            assert _means(report["validation"]) == pytest.approx(validation, rel=tolerance or 1e-6)


def _last(some: list[Any], every: list[Any]) -> list[Any]:
    """Return as many of `every` as there are in `some`, of those in the end."""
    return every[-len(some) :]


def _means(parts: list[list[float]]) -> list[float]:
    return [mean(part) for part in parts]


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
