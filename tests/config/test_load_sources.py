from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.config.documents import parse_yaml
from smpkit.config.load import Sources
from smpkit.config.section import KeyPath
from smpkit.errors import Problem


def sources(text: str, distribution: KeyPath | None = ("distribution",), folder: Path = Path()) -> Sources:
    document = parse_yaml(text, "job.yaml")
    return Sources(folder, document.value, [((), document)], distribution)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMPUTE__SPOT", {"compute": {"spot": "x"}}),
        ("compute__Spot", {"compute": {"spot": "x"}}),
        ("HYPERPARAMETERS__Learning__Rate", {"hyperparameters": {"Learning__Rate": "x"}}),
        ("ENVIRONMENT__LEVEL", {"environment": {"LEVEL": "x"}}),
        ("INPUTS__Train__URI", {"inputs": {"Train": {"uri": "x"}}}),
        ("DISTRIBUTION__PARAMETERS___MATCH_WEIGHTS", {"distribution": {"parameters": {"_match_weights": "x"}}}),
        ("HYPERPARAMETERS", {"hyperparameters": "x"}),
        ("", {"": "x"}),
    ],
)
def test_a_variable_names_a_path_without_case_except_in_names_of_the_user(name: str, value: object) -> None:
    made = sources("{}")
    made.set_variable(f"SMPKIT_JOB__{name}", "x")
    assert (made.value, made.problems) == (value, [])


def test_dots_belong_to_names_of_the_user() -> None:
    made = sources("{}")
    made.set_override("hyperparameters.model.size=1")
    made.set_override("compute.spot=true")
    assert made.value == {"hyperparameters": {"model.size": 1}, "compute": {"spot": True}}


def test_a_problem_is_located_in_the_uppermost_source_that_covers_it() -> None:
    made = sources("compute:\n  spot: 1\n  volume_gb: 0\n")
    made.set_override("compute.spot=2")
    places = [made.locate(Problem(("compute", name), "x")).place for name in ("spot", "volume_gb", "other")]
    assert places == ["--set compute.spot", "job.yaml:3", "job.yaml:1"]
    made.set_override("compute={spot: 3}")
    assert made.locate(Problem(("compute", "volume_gb"), "x")).place == "--set compute"


def test_problems_are_ordered_by_source_and_line() -> None:
    made = sources("a: 1\nb: 2\n")
    made.set_override("c=3")
    located = [made.locate(Problem((name,), "x")) for name in "cba"]
    assert [problem.where for problem in made.in_order(located)] == ["a", "b", "c"]


def test_a_file_of_parameters_is_told_once_although_later_sources_look_again(tmp_path: Path) -> None:
    made = sources("distribution: {enabled: true, parameters: no.json}", folder=tmp_path)
    made.resolve_parameters()
    made.set_override("compute.spot=true")
    (problem,) = made.problems
    assert (problem.place, problem.where) == ("job.yaml:1", "distribution.parameters")


def test_kinds_without_a_distribution_read_no_other_file(tmp_path: Path) -> None:
    made = sources("parameters: no.json", None, tmp_path)
    made.resolve_parameters()
    assert made.value == {"parameters": "no.json"}


def test_origins_follow_short_forms_and_aliases() -> None:
    made = sources("distribution:\n  enabled: true\n  parameters:\n    partitions: 2\ncheckpoints: here\n")
    block = ("distribution", "smdistributed", "modelparallel")
    assert made.origin((*block, "enabled")) == "job.yaml:2"
    assert made.origin((*block, "parameters", "pipeline_parallel_degree")) == "job.yaml:4"
    assert made.origin((*block, "parameters", "microbatches")) == "default"
    assert made.origin(("checkpoints", "uri")) == "job.yaml:5"
    assert made.origin(("checkpoints", "local_path")) == "default"
