from __future__ import annotations

import json
from pathlib import Path

import pytest

from smpkit.config.documents import parse
from smpkit.config.load import edited, file_of_parameters
from smpkit.errors import ConfigError, UsageError

PARAMETERS = ("distribution", "smdistributed", "modelparallel", "parameters")
JOB = """\
# the job
entry_point: train.py   # runs
distribution:
  smdistributed:
    modelparallel:
      enabled: true
      parameters:
        # degrees
        pipeline_parallel_degree: 2   # stages
        microbatches: 4
        optimize: speed

  # and the launcher
  mpi: {enabled: true, processes_per_host: 8}
"""


def test_values_change_and_everything_else_stays() -> None:
    changes = {"pipeline_parallel_degree": 16, "ddp": True, "pipeline": "zero_bubble"}
    expected = JOB.replace("degree: 2   #", "degree: 16  #").replace(
        "        optimize: speed\n", "        ddp: true\n        pipeline: zero_bubble\n        optimize: speed\n"
    )
    assert edited(JOB, "job.yaml", PARAMETERS, changes) == expected


def test_keys_are_removed_with_their_line() -> None:
    found = edited(JOB, "job.yaml", PARAMETERS, {"microbatches": 8}, frozenset({"optimize", "fp16"}))
    assert found == JOB.replace("microbatches: 4", "microbatches: 8").replace("        optimize: speed\n", "")
    assert edited("a: {b: 1, c: 2}\n", "f.yaml", ("a",), {}, frozenset({"b"})) == "a: {c: 2}\n"
    assert edited("a: {b: 1, c: 2}\n", "f.yaml", ("a",), {}, frozenset({"c"})) == "a: {b: 1}\n"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("{a: {b: 1}}\n", "{a: {b: 1, c: 2}}\n"),
        ("a: {}\n", "a:\n  c: 2\n"),
        ("a: {b: 1, c: [1, 2], d: 4}\n", "a: {b: 1, c: 2, d: 4}\n"),
        ("a:\n  b: 1", "a:\n  b: 1\n  c: 2\n"),
        ("a:\n  b:\n    - 1\n    - 2\n# end\n", "a:\n  b:\n    - 1\n    - 2\n# end\n  c: 2\n"),
        ("a:\n  b: 1\n\n# about d\nd: 3\n", "a:\n  c: 2\n  b: 1\n\n# about d\nd: 3\n"),
        ("x: 1\n", "x: 1\na:\n  c: 2\n"),
        ("{x: 1}\n", "{x: 1, a: {c: 2}}\n"),
        ("a:\n  c:\n  d: 1\n", "a:\n  c: 2\n  d: 1\n"),
    ],
)
def test_in_any_style_the_text_says_what_it_should(text: str, after: str) -> None:
    found = edited(text, "file.yaml", ("a",), {"c": 2})
    assert parse(found, "file.yaml").value == parse(after, "file.yaml").value
    assert found == after


def test_what_cannot_be_changed_in_place_is_said() -> None:
    with pytest.raises(UsageError, match="repeats another value at `a`"):
        edited("z: &one {b: 1}\na: *one\n", "f.yaml", ("a",), {"c": 2})
    with pytest.raises(ConfigError):
        edited("a: {", "f.yaml", ("a",), {"c": 2})


def test_json_keeps_its_indentation() -> None:
    text = '{\n   "a": {\n      "b": 1\n   }\n}\n'
    found = edited(text, "f.json", ("a",), {"c": True}, frozenset({"b"}))
    assert found == '{\n   "a": {\n      "c": true\n   }\n}\n'
    assert json.loads(edited("{}", "f.json", ("a", "b"), {"c": 1})) == {"a": {"b": {"c": 1}}}


def test_the_file_of_the_parameters_is_found(tmp_path: Path) -> None:
    def written(text: str) -> tuple[Path, tuple[str | int, ...]]:
        (tmp_path / "job.yaml").write_text(text)
        return file_of_parameters(tmp_path / "job.yaml")

    job = tmp_path / "job.yaml"
    assert written(JOB) == (job, PARAMETERS)
    assert written("entry_point: train.py\n") == (job, PARAMETERS)
    inside = written("entry_point: t.py\ndistribution: {parameters: {ddp: true}}\n")
    assert inside == (job, ("distribution", "parameters"))
    assert written("entry_point: t.py\ndistribution: {parameters: mp.yaml}\n") == (tmp_path / "mp.yaml", ())
    assert written("smdistributed: {modelparallel: {enabled: true}}\n") == (job, PARAMETERS[1:])
    assert written("microbatches: 4\n") == (job, ())
