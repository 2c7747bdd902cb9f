from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Smpkit

BAD = """\
entry_point: train.py
compute:
  instance_type: local
  instance_cuont: 2
distribution:
  enabled: true
  parameters:
    tensor_parallel_degree: 0
"""


@pytest.fixture
def bad(folder: Path) -> str:
    (folder / "bad.yaml").write_text(BAD)
    return "bad.yaml"


@pytest.mark.usefixtures("folder")
def test_the_seed_job_is_valid(smpkit: Smpkit) -> None:
    result = smpkit("validate", "job.yaml")
    said = "job.yaml: valid (job `train`: 2 × 8 processes, pipeline 2 × tensor 2 × data 4)\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", said)


@pytest.mark.usefixtures("folder")
def test_verbose_says_how_the_file_was_read(smpkit: Smpkit) -> None:
    assert smpkit("-v", "validate", "job.yaml").stderr.startswith("read as a job file: 13 settings given, ")


def test_all_problems_are_shown_with_line_excerpt_and_hint(bad: str, smpkit: Smpkit) -> None:
    result = smpkit("validate", bad)
    assert (result.exit_code, result.stdout) == (2, "")
    first = "bad.yaml:4: compute.instance_cuont: unknown field\n    4 |   instance_cuont: 2\n\n    hint: did you mean"
    assert result.stderr.startswith(first)
    assert result.stderr.endswith("degree: 0\n\nerror: 2 problems in the job file bad.yaml\n")


def test_json_holds_every_problem(bad: str, smpkit: Smpkit) -> None:
    result = smpkit("validate", bad, "--json")
    assert (result.exit_code, result.stderr) == (2, "")
    content = json.loads(result.stdout)
    assert (content["valid"], content["warnings"]) == (False, [])
    assert content["problems"][0] == {
        "file": "bad.yaml",
        "line": 4,
        "column": 3,
        "path": "compute.instance_cuont",
        "message": "unknown field",
        "hint": "did you mean `instance_count`?",
    }
    assert [(each["line"], each["column"], each["hint"]) for each in content["problems"][1:]] == [(8, 5, None)]


@pytest.mark.usefixtures("folder")
def test_settings_without_effect_are_warnings(smpkit: Smpkit) -> None:
    parameters = "distribution.smdistributed.modelparallel.parameters"
    overrides = ("--set", f"{parameters}.offload_activations=false")
    result = smpkit("validate", "job.yaml", *overrides, code=0)
    assert result.stderr.startswith(
        f"warning: job.yaml:15: {parameters}.activation_loading_horizon: has no effect without offload_activations\n"
        "    15 |         activation_loading_horizon: 4\n\n    hint: "
    )
    assert smpkit("-q", "validate", "job.yaml", *overrides).stderr == ""
    [warning] = json.loads(smpkit("validate", "job.yaml", "--json", *overrides).stdout)["warnings"]
    assert (warning["line"], warning["path"]) == (15, f"{parameters}.activation_loading_horizon")


@pytest.mark.usefixtures("folder")
def test_show_origin_tells_where_each_value_came_from(smpkit: Smpkit) -> None:
    arguments = ["validate", "job.yaml", "--show-origin", "--set", "compute.spot=true"]
    lines = smpkit(*arguments).stdout.splitlines()
    assert lines[0] == 'entry_point = "train.py"  (job.yaml:1)'
    assert "compute.instance_count = 2  (job.yaml:3)" in lines
    assert "compute.spot = true  (--set compute.spot)" in lines
    assert "compute.max_run_seconds = 86400  (default)" in lines
    settings = json.loads(smpkit(*arguments, "--json").stdout)["settings"]
    assert {"key": "compute.spot", "value": True, "origin": "--set compute.spot"} in settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partitions: 2\nmicrobatches: 4\n", "part.yaml: valid (modelparallel configuration)\n"),
        ("mpi: {enabled: true}\n", "part.yaml: valid (distribution)\n"),
        ("entry_point: train.py\n", "part.yaml: valid (job `train`: 1 host, no modelparallel parameters)\n"),
        (
            "entry_point: train.py\ncompute: {instance_count: 2}\ndistribution: {enabled: true, parameters: {}}\n",
            "part.yaml: valid (job `train`: 2 hosts, pipeline 1 × tensor 1)\n",
        ),
    ],
    ids=["parameters", "distribution", "plain job", "unknown number of ranks"],
)
def test_what_was_recognised_is_said(text: str, said: str, folder: Path, smpkit: Smpkit) -> None:
    (folder / "part.yaml").write_text(text)
    result = smpkit("validate", "part.yaml")
    assert (result.exit_code, result.stderr) == (0, said)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("no.yaml", None, "no.yaml: cannot be read: no such file or directory"),
        ("a.yaml", b"a: [", "a.yaml:1:5: is not YAML: the text ends where a value should stand"),
        ("a.yaml", b'"\\e[31m": 1', "a.yaml:1: \\x1b[31m: unknown field"),
    ],
    ids=["missing", "yaml", "escape"],
)
def test_files_that_cannot_be_read_are_one_plain_error(
    name: str, content: bytes | None, said: str, folder: Path, smpkit: Smpkit
) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    result = smpkit("validate", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(said)
    as_json = smpkit("validate", name, "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["valid"], as_json.stderr) == (2, False, "")
