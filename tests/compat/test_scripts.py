"""Scripts written in SMP v1's API, with its import, give over ranks what they give alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.commands import run_script


def _run(script: str, folder: Path, *arguments: str, ranks: int, parameters: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    given = ("--model-dir", str(folder), "--report", str(folder / "report.json"), *arguments)
    run_script(script, *given, ranks=ranks, parameters=parameters, timeout=170)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_mnist(tmp_path: Path) -> None:
    """Pipeline 2 × data 2 learns the digits, to the same losses as one process, and loads what it saved."""
    job = {"partitions": 2, "ddp": True, "placement_strategy": "spread", "pipeline": "interleaved", "optimize": "speed"}
    arguments = ("--double", "1", "--mp_parameters", "ddp=True,microbatches=4,partitions=2")
    alone = _run("mnist.py", tmp_path / "1", *arguments, ranks=1, parameters={"microbatches": 4})
    over_ranks = _run("mnist.py", tmp_path / "4", *arguments, ranks=4, parameters={**job, "microbatches": 4})
    assert alone["losses"][-1] < alone["losses"][0] / 2
    assert alone["accuracy"] > 0.9
    assert over_ranks["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    assert over_ranks["accuracy"] == alone["accuracy"]
    saved = sorted(path.name for path in (tmp_path / "4").iterdir())
    assert saved == ["pt_mnist.pt", "pt_mnist_checkpoint.pt_0", "pt_mnist_checkpoint.pt_1", "report.json"]
