from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from smpkit.config.job import Checkpoints, JobConfig
from tests.config.test_distribution import MPI, block
from tests.config.test_section import problems_of


def job(**fields: Any) -> JobConfig:
    return JobConfig.model_validate({"entry_point": "train.py", **fields})


problems = partial(problems_of, JobConfig)


def test_only_the_entry_point_is_required() -> None:
    made = job()
    assert (made.name, made.source_dir, made.compute.instance_type) == ("train", ".", "local")
    assert made.compute.max_run_seconds == 86_400
    assert problems({}) == ["entry_point: is required"]


@pytest.mark.parametrize(
    ("entry_point", "name"),
    [("train_gpt.py", "train-gpt"), ("src/_a__b_.py", "a-b"), ("ü.py", "job"), ("x" * 80 + ".py", "x" * 63)],
)
def test_the_default_name_is_made_of_the_entry_point(entry_point: str, name: str) -> None:
    assert job(entry_point=entry_point).name == name


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize("name", ["", "-a", "a-", "a_b", "a b", "x" * 64, "a\n", "ü"], ids=ascii)
def test_names_that_sagemaker_refuses_are_refused(name: str) -> None:
    (problem,) = problems({"entry_point": "train.py", "name": name})
    assert problem.startswith("name: must have 1 to 63 letters, digits and hyphens")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entry_point": "/a/train.py"}, "entry_point: must be a path inside source_dir"),
        ({"entry_point": "../train.py"}, "entry_point: must be a path inside source_dir"),
        ({"entry_point": "train.rb"}, "entry_point: must be a Python script"),
        ({"entry_point": "a.sh", "distribution": {"mpi": {"enabled": True}}}, "is a shell script, which runs once on"),
        ({"entry_point": "a.sh", "distribution": {"enabled": True, "parameters": {}}}, "that `modelparallel` asks for"),
        ({"compute": {"instance_count": 100_001}}, "compute.instance_count: must be at most 100000, got 100001"),
        ({"source_dir": ""}, "source_dir: must be a folder or an S3 URI, got ``"),
        ({"source_dir": "s3://B"}, "source_dir: must name a bucket, which has 3 to 63 lower-case letters"),
        ({"checkpoints": "s3:///x"}, "checkpoints: must name a bucket, which has 3 to 63 lower-case letters"),
        ({"hyperparameters": {"sagemaker_x": 1}}, "hyperparameters.sagemaker_x: is a name that SageMaker keeps"),
        ({"hyperparameters": {"mp_parameters": 1}}, "hyperparameters.mp_parameters: is a name that SageMaker keeps"),
        ({"hyperparameters": {"x" * 257: 1}}, "a name must have 1 to 256 characters, got 257"),
        ({"hyperparameters": {"": 1}}, "a name must have 1 to 256 characters, got 0"),
        ({"hyperparameters": {"a": "x" * 70_000}}, "hyperparameters: has 70,009 bytes as JSON"),
        ({"environment": {"A": "x" * 140_000}}, "environment.A: has 140,002 bytes as JSON"),
        ({"hyperparameters": {"a": [1, {"b": float("inf")}]}}, "JSON can hold, with finite numbers, got a list"),
        ({"hyperparameters": {"a": CYCLE}}, "hyperparameters.a: must be something that JSON can hold"),
        ({"hyperparameters": {"a": {1: 2}}}, "hyperparameters.a: must be something that JSON can hold"),
        ({"hyperparameters": {"a": object()}}, "hyperparameters.a: must be something that JSON can hold"),
        ({"environment": {"1A": "x"}}, "environment.1A: a variable's name must have"),
        ({"environment": {"A-B": "x"}}, "environment.A-B: a variable's name must have"),
        ({"inputs": {"a b": "x"}}, "inputs.a b: a channel's name must have"),
        ({"inputs": {"train": "ftp://x"}}, "inputs.train: must be a folder or an S3 URI"),
        ({"inputs": {"train": {}}}, "inputs.train.uri: is required"),
        ({"inputs": {"train": {"uri": "x", "mode": "file"}}}, "inputs.train.mode: must be one of `File`"),
        ({"checkpoints": {"uri": "x", "local_path": "y"}}, "checkpoints.local_path: must be an absolute path"),
        ({"checkpoints": 3}, "checkpoints: must be text or a mapping, got 3"),
        ({"image": "a b"}, "image: must have 1 to 255 characters and no blanks"),
        ({"role": ""}, "role: must be an IAM role, by name or ARN, got ``"),
        ({"role": "arn:aws:iam::12:role/x"}, "role: must be an IAM role, by name or ARN, got"),
        ({"compute": {"instance_type": "ml.p4d.24xlrage"}}, "compute.instance_type: must be `local` or a SageMaker"),
        ({"backend": "awsbatch"}, "backend: is no back end: `awsbatch` hint: did you mean `batch`?"),
        ({"backend": {"name": "pbs"}}, "backend.name: is no back end: `pbs` hint: those are `sagemaker`, `slurm`"),
        ({"backend": {"slurm": {"options": ["--array=0-3"]}}}, "backend.slurm.options[0]: would be several jobs"),
        ({"backend": {"slurm": {"options": ["-v", "-N4"]}}}, "options[1]: is `compute.instance_count` for all"),
        ({"experiment": {"display_name": "a b"}}, "experiment.display_name: must have at most 120 letters, digits"),
        ({"output": "s3:team"}, "output: must be a folder or an S3 URI, which begins with `s3://`, got `s3:team`"),
        ({"checkpoints": "~/ck"}, "checkpoints: must be a folder or an S3 URI, and only a shell replaces `~`, got"),
        ({"distribution": {"processes_per_host": 2}}, "distribution.processes_per_host: belongs to the launcher"),
        ({"distribution": {"mpi": {"enabled": True, "parameters": {}}}}, "distribution.mpi.parameters: belongs to"),
        ({"framework_version": "2"}, "framework_version: is decided by the image hint: name an image in `image`"),
        ({"checkpoints": {"uri": "x", "url": "y"}}, "checkpoints.url: is called `uri` here"),
        ({"checkpoints": {"url": "y"}}, "checkpoints.url: is called `uri` here"),
        ({"mpi": {}}, "mpi: belongs to `distribution` hint: write `distribution: {mpi: ...}`"),
        ({"modelparallel": {}}, "`distribution` hint: write `distribution: {smdistributed: {modelparallel: ...}}`"),
        ({"parameters": {}}, "{smdistributed: {modelparallel: {enabled: true, parameters: ...}}}`"),
        ({"compute": {"max_wait_seconds": 90_000}}, "compute.max_wait_seconds: requires spot"),
        ({"compute": {"spot": True, "max_wait_seconds": 9}}, "compute.max_wait_seconds: must be at least max_run_seco"),
        ({"compute": {"keep_alive_seconds": 30_000}}, "compute.keep_alive_seconds: must be at most 21600, got 30000"),
        ({"instance_count": 2}, "instance_count: belongs to `compute`"),
        ({"microbatches": 2}, "microbatches: belongs to `distribution.smdistributed.modelparallel.parameters`"),
        ({"distribution": {"mpi": {"enabled": True}, "ddp": True}}, "distribution.ddp: belongs to `parameters` of"),
        ({"distribution": {"modelparallel": {}}}, "distribution.modelparallel: belongs to `smdistributed`"),
        ({"image_uri": "x"}, "image_uri: is called `image` here"),
        ({"live_output": True}, "live_output: has no meaning: results are uploaded when the job is over"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    (problem,) = problems({"entry_point": "train.py", **fields})
    assert message in problem


def test_a_text_is_short_for_its_uri() -> None:
    made = job(checkpoints="s3://bucket/here", inputs={"train": "data", "test": {"uri": "s3://bucket"}})
    assert made.checkpoints == Checkpoints(uri="s3://bucket/here", local_path="/opt/ml/checkpoints")
    assert {name: channel.uri for name, channel in made.inputs.items()} == {"train": "data", "test": "s3://bucket"}


OF_SIX = {**block(), "mpi": {"enabled": True, "processes_per_host": 6}}
"""Degrees 2 × 2, which six ranks of a host do not fit."""


def test_degrees_must_fit_the_ranks_where_their_number_is_known() -> None:
    job(distribution={**block(), "mpi": MPI}, compute={"instance_count": 2})
    (problem,) = problems({"entry_point": "a.py", "distribution": OF_SIX})
    assert problem.startswith(
        "distribution.smdistributed.modelparallel.parameters.pipeline_parallel_degree: "
        "times tensor_parallel_degree must divide the number of ranks (6), got 2 × 2 = 4"
    )
    job(distribution={**block(), "mpi": {"enabled": True}})


def test_degrees_are_checked_although_something_else_is_wrong() -> None:
    told = problems({"distribution": OF_SIX, "compute": {"volume_gb": -1}, "entry_point": "a"})
    places = [problem.split(":")[0].rpartition(".")[2] for problem in told]
    assert places == ["entry_point", "volume_gb", "pipeline_parallel_degree"]
    distribution = {**block({"tensor_parallel_degree": 16}), "mpi": MPI}
    requires, divides = problems({"distribution": distribution, "entry_point": "a.py"})
    assert "requires ddp" in requires
    assert "must divide the number of ranks (8), got 16" in divides


def test_degrees_are_checked_although_another_parameter_is_wrong() -> None:
    wrong = {"microbatches": "4", "tensor_parallel_degree": 2.0, "ddp": True, "microbatch": 4}
    parameters = {"pipeline_parallel_degree": 3, **wrong}
    distribution = {"enabled": True, "parameters": parameters, "mpi": {**MPI, "options": ""}}
    told = problems({"distribution": distribution, "entry_point": "a.py"})
    places = [problem.split(":")[0].rpartition(".")[2] for problem in told]
    assert places == ["microbatches", "tensor_parallel_degree", "microbatch", "options", "pipeline_parallel_degree"]
    assert "must divide the number of ranks (8), got 3" in told[-1]


def test_degrees_are_not_judged_by_a_number_of_hosts_that_is_wrong() -> None:
    (problem,) = problems({"distribution": OF_SIX, "compute": {"instance_count": "2"}, "entry_point": "a.py"})
    assert problem.startswith("compute.instance_count: ")


def test_variables_of_the_launcher_and_parameters_without_effect_are_told() -> None:
    environment = {"SM_HPS": "x", "RANK": "1", "LD_PRELOAD": "/lib/x.so", "SMP": "x"}
    own, rank, preloaded = map(str, job(environment=environment).notices())
    assert own == "environment.SM_HPS: is set by the launcher, which overwrites it"
    assert rank.startswith("environment.RANK: is set by the launcher")
    assert preloaded.startswith("environment.LD_PRELOAD: is loaded into every process of the container")
    assert "hint: keep it only if every program of the image works with it" in preloaded
    distribution = {"enabled": True, "parameters": {"activation_loading_horizon": 2}}
    [notice] = job(distribution=distribution).notices()
    assert notice.where == "distribution.parameters.activation_loading_horizon"


@pytest.mark.parametrize("where", ["", "compute", "distribution", "inputs.x"])
def test_instance_groups_are_refused_by_name(where: str) -> None:
    data: dict[str, Any] = {"instance_groups": [{"name": "data"}]}
    if where == "inputs.x":
        data = {"uri": "data", **data}
    for part in reversed(where.split(".") if where else []):
        data = {part: data}
    (problem,) = problems({"entry_point": "train.py", **data})
    assert problem.startswith(f"{where}.instance_groups: would mix machines of several kinds".removeprefix("."))


@pytest.mark.parametrize("mount", ["/opt/ml", "/dev/shm/", "/etc/smpkit"])
def test_no_volume_hides_what_smpkit_has_in_a_pod(mount: str) -> None:
    volumes = [{"mount": mount, "claim": "data"}]
    (problem,) = problems({"entry_point": "train.py", "backend": {"kubernetes": {"volumes": volumes}}})
    assert "is a place that smpkit needs" in problem
