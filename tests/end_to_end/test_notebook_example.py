"""The notebook runs from top to bottom, with the schedule's picture and the loss in it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.end_to_end.example_job import EXAMPLES

NOTEBOOK = EXAMPLES / "notebook" / "pipeline.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "60")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    shutil.copy(NOTEBOOK, tmp_path)
    ran: Any = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    NotebookClient(ran, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/svg+xml", "image/png"} <= kinds
    said = "".join(output.get("text", "") for output in outputs)
    assert "stage 1  .  F0 B0" in said
    assert "2 ranks, pipeline 2" in said
    first, last = map(float, said.strip().splitlines()[-1].split(" -> "))
    assert last < first / 2


def test_no_output_is_committed() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [cell.outputs for cell in cells if cell.cell_type == "code" and cell.outputs] == []
