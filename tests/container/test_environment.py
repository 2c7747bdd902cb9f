from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smpkit.errors import ConfigError
from smpkit_container.environment import DEFAULT_BASE, Environment, base_folder, count_cpus, count_gpus


def write(base: Path, name: str, value: Any) -> None:
    folder = base / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def read(base: Path, environ: dict[str, str] | None = None) -> Environment:
    return Environment.read(base, environ or {}, num_gpus=0, num_cpus=4)


def test_missing_files_mean_defaults(tmp_path: Path) -> None:
    environment = read(tmp_path, {"TRAINING_JOB_NAME": "job-1"})
    assert environment.hyperparameters == {}
    assert environment.resources.hosts == ("algo-1",)
    assert environment.job_name == "job-1"
    assert environment.checkpoints == tmp_path / "checkpoints"
    assert environment.script == ""


def test_jobs_of_a_tuner_have_names_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "hyperparameters", {"sagemaker_job_name": '"estimator"'})
    assert read(tmp_path, {"TRAINING_JOB_NAME": "tuner-001"}).job_name == "tuner-001"
    assert read(tmp_path).job_name == "estimator"


def test_hyperparameters_are_decoded_and_split(tmp_path: Path) -> None:
    sent = {
        "epochs": "3",
        "lr": "0.001",
        "flag": "true",
        "name": '"a b"',
        "unquoted": "plain text of SDK v3",
        "mp_parameters": '{"partitions": 2}',
        "sagemaker_program": '"train.py"',
        "sagemaker_mpi_enabled": "true",
        "smpkit_own": "1",
    }
    write(tmp_path, "hyperparameters", sent)
    environment = read(tmp_path)
    assert environment.hyperparameters == {
        "epochs": 3,
        "lr": 0.001,
        "flag": True,
        "name": "a b",
        "unquoted": "plain text of SDK v3",
        "mp_parameters": {"partitions": 2},
        "smpkit_own": 1,
    }
    assert environment.framework == {"sagemaker_program": "train.py", "sagemaker_mpi_enabled": True}
    assert environment.mp_parameters == {"partitions": 2}
    assert environment.script == "train.py"


def test_sources_are_in_the_submit_folder_if_there_is_one(tmp_path: Path) -> None:
    write(tmp_path, "hyperparameters", {"sagemaker_submit_directory": json.dumps(str(tmp_path))})
    assert read(tmp_path).code == tmp_path
    write(tmp_path, "hyperparameters", {"sagemaker_submit_directory": '"s3://bucket/sourcedir.tar.gz"'})
    assert read(tmp_path).code == tmp_path / "code"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hyperparameters", "{", "cannot be read as JSON"),
        ("hyperparameters", "[1]", "must hold a JSON object, not a list"),
        ("hyperparameters", {"mp_parameters": '"x.json"'}, "mp_parameters: must be a JSON object"),
        ("hyperparameters", {"a": '"x\\u0000y"'}, "hyperparameters.a: holds a NUL character"),
        ("resourceconfig", {"hosts": []}, "resourceconfig.hosts: must be a list of host names"),
        ("resourceconfig", {"hosts": "algo-1"}, "must be a list of host names"),
        ("resourceconfig", {"hosts": ["a"], "current_host": "b"}, "`b` is not one of the hosts: a"),
        ("hyperparameters", {"sagemaker_distribution_instance_groups": '["train"]'}, "submit a job for each kind"),
        ("hyperparameters", {"sagemaker_s3_output": '"x"'}, "sagemaker_s3_output: .* smpkit does not do"),
        ("hyperparameters", {"sagemaker_smpkit_packed": '"x"'}, "sagemaker_smpkit_packed: is not known to the smpkit"),
    ],
    ids=[
        *("not json", "not an object", "mp_parameters", "nul", "no hosts", "hosts text", "unknown host", "groups"),
        *("not done here", "of another release"),
    ],
)
def test_what_a_host_cannot_take_is_refused_by_name(tmp_path: Path, name: str, content: Any, message: str) -> None:
    write(tmp_path, name, content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, "hyperparameters", "{")
    write(tmp_path, "inputdataconfig", "no")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    assert len(caught.value.problems) == 2


def test_base_folder_can_be_moved() -> None:
    assert base_folder({}) == DEFAULT_BASE
    assert base_folder({"SAGEMAKER_BASE_DIR": "/a"}) == Path("/a")
    assert base_folder({"SAGEMAKER_BASE_DIR": "/a", "SMPKIT_BASE_DIR": "/b"}) == Path("/b")


THREE = """GPU 0: NVIDIA H200 (UUID: GPU-11aa-1)
GPU 1: NVIDIA H200 (UUID: GPU-11ab-2)
GPU 2: NVIDIA H200 (UUID: GPU-22cc-3)
"""
DIVIDED = """GPU 0: NVIDIA H200 (UUID: GPU-11aa-1)
  MIG 1g.18gb     Device  0: (UUID: MIG-aaaa-1)
  MIG 1g.18gb     Device  1: (UUID: MIG-bbbb-2)
"""


def gpus_seen(listed: str, visible: str | None) -> int:
    return count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, ("printf", listed))


def test_a_machine_without_the_drivers_tool_has_no_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert count_gpus({}, ("no-such-tool-anywhere",)) == 0
    assert capsys.readouterr().err == ""
    assert count_gpus({}, ("sh", "-c", "echo NVIDIA-SMI has failed; exit 9")) == 0
    assert "no GPUs are used, as they cannot be counted: NVIDIA-SMI has failed" in capsys.readouterr().err
    assert count_cpus() >= 1


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        *((None, 3), ("0,2", 2), (" 1 , 0", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,-1,1", 1), ("0,7,1", 1)),
        *(("1,1", 0), ("GPU-22cc-3", 1), ("GPU-22,GPU-11ab", 2), ("GPU-11", 0), ("GPU-nowhere,0", 0)),
    ],
)
def test_gpus_are_counted_as_a_rank_sees_them(visible: str | None, count: int) -> None:
    assert gpus_seen(THREE, visible) == count


@pytest.mark.parametrize("visible", [None, "MIG-bbbb-2", "MIG-aaaa-1,MIG-bbbb-2"])
def test_a_process_sees_one_slice_of_a_divided_gpu(visible: str | None) -> None:
    assert gpus_seen(DIVIDED + "GPU 1: NVIDIA H200 (UUID: GPU-33dd-4)\n", visible) == 1


def test_what_smpkit_itself_sends_is_known(tmp_path: Path) -> None:
    ours = ("sagemaker_smpkit_processes_per_host", "sagemaker_smpkit_secrets", "sagemaker_smpkit_token_file")
    write(tmp_path, "hyperparameters", dict.fromkeys(ours, "2"))
    assert read(tmp_path).framework == dict.fromkeys(ours, 2)


def test_what_a_tuner_adds_does_not_reach_the_script(tmp_path: Path) -> None:
    """SageMaker adds it to every tuning job; argparse scripts would end with "unrecognized arguments"."""
    write(tmp_path, "hyperparameters", {"_tuning_objective_metric": '"loss"', "lr": "0.1"})
    environment = read(tmp_path)
    assert dict(environment.hyperparameters) == {"lr": 0.1}
    assert environment.framework["_tuning_objective_metric"] == "loss"


def test_an_image_may_name_its_own_entry_point(tmp_path: Path) -> None:
    variables = {"SAGEMAKER_PROGRAM": "own.py", "SAGEMAKER_SUBMIT_DIRECTORY": "s3://bucket/own.tar.gz"}
    environment = read(tmp_path, variables)
    assert environment.script == "own.py"
    assert environment.framework["sagemaker_submit_directory"] == "s3://bucket/own.tar.gz"
    write(tmp_path, "hyperparameters", {"sagemaker_program": '"train.py"'})
    assert read(tmp_path, variables).script == "train.py"
