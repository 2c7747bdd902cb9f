"""Each example is a folder with a job file that names its script, and a test that runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
import yaml

from smpkit.config.job import JobConfig
from smpkit.config.load import load_job
from smpkit.config.section import validated
from tests.docs.blocks import ROOT, blocks_of

FOLDERS = sorted(path for path in (ROOT / "examples").iterdir() if any(path.glob("[!_.]*.*")))
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
_WRITES_JOB = "%%writefile runs/job.yaml\n"


@each_folder
def test_it_has_a_job_file_that_names_its_script(folder: Path) -> None:
    """A notebook writes both in its cells, so that it is whole wherever one opens it."""
    notebooks = list(folder.glob("*.ipynb"))
    if not notebooks:
        assert (folder / load_job(folder / "job.yaml").config.entry_point).is_file()
        return
    cells = [cell.source for path in notebooks for cell in nbformat.read(path, as_version=4).cells]
    (written,) = (cell.removeprefix(_WRITES_JOB) for cell in cells if cell.startswith(_WRITES_JOB))
    job = validated(JobConfig, yaml.safe_load(written), subject=folder.name)
    assert any(cell.startswith(f"%%writefile runs/{job.entry_point}\n") for cell in cells)


@each_folder
def test_a_test_runs_it(folder: Path) -> None:
    tests = {ROOT / block.run_by for block in blocks_of(folder / "README.md") if block.run_by}
    names = [name for test in tests if {"end_to_end", "slurm"} & {*test.parts} for name in _tests_in(test)]
    assert [name for name in names if name != "test_no_output_is_committed"] != []


def _tests_in(test: Path) -> list[str]:
    """Return the functions of a file that are tests."""
    nodes = ast.parse(test.read_text(encoding="utf-8")).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
