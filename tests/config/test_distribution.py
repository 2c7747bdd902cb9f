from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from smpkit.config.distribution import Distribution
from smpkit.config.section import validated
from tests.config.test_modelparallel import SEED
from tests.config.test_section import problems_of

MPI = {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none "}


def block(parameters: Any = SEED, enabled: Any = True) -> dict[str, Any]:
    return {"smdistributed": {"modelparallel": {"enabled": enabled, "parameters": parameters}}}


problems = partial(problems_of, Distribution)


def test_the_seed_distribution_is_accepted_unchanged() -> None:
    made = Distribution.model_validate({**block(), "mpi": MPI})
    assert made.model_parallel is not None
    assert made.parameters_as_written == SEED
    assert (made.launcher, made.processes_per_host) == ("mpirun", 8)
    assert made.custom_mpi_options == MPI["custom_mpi_options"]
    assert made.notices() == []


def test_smp_options_without_the_keys_around_them_are_accepted() -> None:
    options = {"enabled": True, "parameters": SEED}
    made = Distribution.model_validate({**options, "mpi": MPI})
    assert made.model_parallel == Distribution.model_validate({**block(), "mpi": MPI}).model_parallel
    assert made.parameters_as_written == SEED
    assert made.launcher == "mpirun"
    assert Distribution.model_validate(options).launcher == "torchrun"
    as_object = Distribution.model_validate({"enabled": True, "parameters": made.model_parallel})
    assert as_object.parameters_as_written == SEED


@pytest.mark.parametrize(
    ("data", "launcher", "processes_per_host"),
    [
        ({}, "torchrun", None),
        ({"mpi": {"enabled": True}}, "mpirun", None),
        ({"mpi": {"enabled": False, "processes_per_host": 8}}, "torchrun", None),
        ({"torch_distributed": {"enabled": True, "processes_per_host": 2}}, "torchrun", 2),
        ({"torch_distributed": {"enabled": False, "processes_per_host": 2}}, "torchrun", None),
        ({"torch_distributed": {"enabled": False}, "mpi": {"enabled": True, "processes_per_host": 2}}, "mpirun", 2),
    ],
)
def test_the_enabled_launcher_counts(data: dict[str, Any], launcher: str, processes_per_host: int | None) -> None:
    made = Distribution.model_validate(data)
    assert (made.launcher, made.processes_per_host) == (launcher, processes_per_host)


def test_a_disabled_library_has_no_parameters_and_says_so() -> None:
    made = Distribution.model_validate(block(enabled=False))
    assert made.model_parallel is None
    assert made.world_problems(3) == []
    assert [notice.where for notice in made.notices()] == ["smdistributed.modelparallel.parameters"]


def test_empty_parameters_mean_all_defaults() -> None:
    made = Distribution.model_validate({"smdistributed": {"modelparallel": {"enabled": True}}})
    assert made.model_parallel is not None
    assert made.parameters_as_written == {}
    assert Distribution.model_validate(block({})).model_parallel == made.model_parallel


@pytest.mark.parametrize("enabled", [1, "true", "True", None], ids=repr)
def test_enabled_must_be_the_literal_true(enabled: object) -> None:
    (problem,) = problems(block(enabled=enabled))
    assert problem.startswith("smdistributed.modelparallel.enabled: must be the literal true or false, got")
    assert "which SageMaker takes as false hint: write `enabled: true`" in problem


def test_enabled_must_be_written() -> None:
    hint = "write `enabled: true`; without it SageMaker ignores the block"
    assert problems({"mpi": {"processes_per_host": 8}}) == [f"mpi.enabled: is required hint: {hint}"]
    assert problems({"parameters": {}}) == [f"enabled: is required hint: {hint}"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mpi": {"enabled": True, "process_per_host": 8}}, "mpi.process_per_host: unknown field hint: did you mean"),
        ({"mpi": {"enabled": True, "processes_per_host": 0}}, "mpi.processes_per_host: must be at least 1, got 0"),
        ({"mpi": {"enabled": True, "custom_mpi_options": "-np 4"}}, "custom_mpi_options: `-np 4` is set by smpkit"),
        ({"mpi": {"enabled": True}, "torch_distributed": {"enabled": True}}, "torch_distributed.enabled: cannot be"),
        ({"smdistributed": {"dataparallel": {"enabled": True}}}, "smdistributed.dataparallel: is SageMaker's data-par"),
        ({**block(), "pytorchddp": {"enabled": True}}, "pytorchddp: is SageMaker's name for plain data parallelism"),
        ({"parameter_server": {"enabled": True}}, "parameter_server: is a launcher"),
        ({**block(), "mpii": {}}, "mpii: unknown field hint: did you mean `mpi`?"),
        (block("parameters.json"), "parameters: is the path of a file (`parameters.json`), which only a file may"),
        (block([]), "smdistributed.modelparallel.parameters: must be a mapping, got a list"),
        ({"enabled": True, "parameters": {"microbatches": 0}}, "parameters.microbatches: must be at least 1, got 0"),
        ({"enabled": True, "parametrs": {}}, "parametrs: unknown field hint: did you mean `parameters`?"),
        ({"enabled": 1, "parameters": {}}, "enabled: must be the literal true"),
        ([], "must be a mapping, got a list"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else None,
)
def test_traps_of_the_sdk_are_plain_errors(data: object, message: str) -> None:
    assert any(message in problem for problem in problems(data)), problems(data)


def test_settings_of_a_disabled_launcher_are_noticed() -> None:
    made = Distribution.model_validate({"mpi": {"enabled": False, "processes_per_host": 8, "custom_mpi_options": "-v"}})
    assert [notice.where for notice in made.notices()] == ["mpi.custom_mpi_options", "mpi.processes_per_host"]


@pytest.mark.parametrize("bare", [False, True], ids=["full", "bare"])
def test_notices_and_world_problems_name_the_place_as_written(bare: bool) -> None:
    parameters = {"partitions": 2, "pipeline": "simple", "microbatches": 8}
    data = {"enabled": True, "parameters": parameters} if bare else block(parameters)
    made = validated(Distribution, data, subject="distribution")
    prefix = "parameters" if bare else "smdistributed.modelparallel.parameters"
    assert [notice.where for notice in made.notices()] == [f"{prefix}.pipeline"]
    assert [problem.where for problem in made.world_problems(3)] == [f"{prefix}.partitions"]
