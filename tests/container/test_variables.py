from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit_container.environment import Environment, Folders, Resources
from smpkit_container.topology import Topology
from smpkit_container.variables import (
    mpi_rank_variables,
    platform_variables,
    process_variables,
    script_arguments,
    torchrun_variables,
)

GROUP = {"instance_group_name": "main", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-1", "algo-2"]}

ENVIRONMENT = Environment(
    folders=Folders(Path("/opt/ml")),
    hyperparameters={"mp_parameters": {"partitions": 2, "ddp": True}, "batch-size": 4, "name": "a b"},
    framework={"sagemaker_program": "train.py", "sagemaker_mpi_enabled": True, "sagemaker_region": "eu-west-1"},
    resources=Resources(
        hosts=("algo-1", "algo-2"),
        current_host="algo-2",
        instance_type="ml.p4d.24xlarge",
        group_name="main",
        groups=(GROUP,),
        interface="eth0",
        raw={"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]},
    ),
    channels={"train": {"TrainingInputMode": "File"}, "my-test": {"TrainingInputMode": "File"}},
    job_name="job-1",
    num_gpus=8,
    num_cpus=96,
)
TOPOLOGY = Topology(("algo-1", "algo-2"), 1, 8, "mpirun", interface="eth0")

TOOLKIT = """
    SM_HOSTS SM_NETWORK_INTERFACE_NAME SM_HPS SM_USER_ENTRY_POINT SM_FRAMEWORK_PARAMS SM_RESOURCE_CONFIG SM_CHANNELS
    SM_INPUT_DATA_CONFIG SM_OUTPUT_DATA_DIR SM_CURRENT_HOST SM_CURRENT_INSTANCE_TYPE SM_CURRENT_INSTANCE_GROUP
    SM_CURRENT_INSTANCE_GROUP_HOSTS SM_INSTANCE_GROUPS SM_INSTANCE_GROUPS_DICT SM_DISTRIBUTION_INSTANCE_GROUPS
    SM_IS_HETERO SM_MODULE_NAME SM_LOG_LEVEL SM_FRAMEWORK_MODULE SM_INPUT_DIR SM_INPUT_CONFIG_DIR SM_OUTPUT_DIR
    SM_NUM_CPUS SM_NUM_GPUS SM_NUM_NEURONS SM_MODEL_DIR SM_MODULE_DIR SM_TRAINING_ENV SM_USER_ARGS
    SM_OUTPUT_INTERMEDIATE_DIR
"""
SDK_V3 = """
    SM_MASTER_ADDR SM_MASTER_PORT SM_HOST_COUNT SM_CURRENT_HOST_RANK SM_SOURCE_DIR SM_ENTRY_SCRIPT SM_INPUT_DATA_DIR
    SM_OUTPUT_FAILURE SM_DISTRIBUTED_CONFIG
"""


@pytest.fixture
def variables() -> dict[str, str]:
    return platform_variables(ENVIRONMENT, TOPOLOGY, ["--batch-size", "4"])


def test_variables_of_both_toolkits_are_there_in_the_toolkits_form(variables: dict[str, str]) -> None:
    assert {*TOOLKIT.split(), *SDK_V3.split()} <= {*variables}
    expected = {
        "SM_HOSTS": '["algo-1","algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "SM_CURRENT_HOST_RANK": "1",
        "SM_MASTER_ADDR": "algo-1",
        "SM_MASTER_PORT": "7777",
        "SM_HP_MP_PARAMETERS": '{"ddp":true,"partitions":2}',
        "SM_FRAMEWORK_PARAMS": (
            '{"sagemaker_mpi_enabled":true,"sagemaker_program":"train.py","sagemaker_region":"eu-west-1"}'
        ),
        "SM_HP_NAME": "a b",
        "SM_HP_BATCH-SIZE": "4",
        "SM_HP_BATCH_SIZE": "4",
        "SM_CHANNELS": '["my-test","train"]',
        "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
        "SM_CHANNEL_MY-TEST": "/opt/ml/input/data/my-test",
        "SM_CHANNEL_MY_TEST": "/opt/ml/input/data/my-test",
        "SM_USER_ARGS": '["--batch-size","4"]',
        "SM_MODULE_NAME": "train",
        "SM_USER_ENTRY_POINT": "train.py",
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_NUM_GPUS": "8",
        "SM_NUM_CPUS": "96",
        "SM_LOG_LEVEL": "20",
        "SM_IS_HETERO": "false",
        "SM_INSTANCE_GROUPS": '["main"]',
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": '["algo-1","algo-2"]',
        "SM_DISTRIBUTION_INSTANCE_GROUPS": '["main"]',
        "SAGEMAKER_JOB_NAME": "job-1",
        "SAGEMAKER_REGION": "eu-west-1",
        "CURRENT_HOST": "algo-2",
    }
    assert {name: variables[name] for name in expected} == expected


def test_training_env_holds_the_job_in_one_value(variables: dict[str, str]) -> None:
    whole = json.loads(variables["SM_TRAINING_ENV"])
    assert whole["hyperparameters"] == ENVIRONMENT.hyperparameters
    assert whole["job_name"] == "job-1"
    assert whole["is_master"] is False
    assert whole["is_modelparallel_enabled"] is True
    assert whole["distribution_hosts"] == ["algo-1", "algo-2"]
    assert whole["channel_input_dirs"]["train"] == "/opt/ml/input/data/train"
    assert {"is_smddprun_installed", "is_smddpmprun_installed", "topology"} <= set(whole)


def test_names_that_no_environment_can_hold_are_left_out() -> None:
    odd = Environment(folders=Folders(Path("/opt/ml")), hyperparameters={"a=b": 1})
    names = platform_variables(odd, Topology(("algo-1",), 0, 1, "torchrun"), [])
    assert not [name for name in names if "=" in name]


def test_threads_are_shared_among_the_ranks_of_a_host() -> None:
    one_host = Topology(("algo-1",), 0, 4, "torchrun", interface="eth0")
    assert process_variables({}, one_host, 16) == {
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert process_variables({}, one_host, 2)["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_stays() -> None:
    user = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "wlan0"}
    several_hosts = {"PYTHONUNBUFFERED": "1", "NCCL_SOCKET_IFNAME": "eth0"}
    assert process_variables(user, TOPOLOGY, 16) == several_hosts
    assert process_variables({}, TOPOLOGY, 96)["GLOO_SOCKET_IFNAME"] == "eth0"


def test_ranks_see_what_torchrun_sets() -> None:
    """Beside MASTER_ADDR and MASTER_PORT, which every rank of a host has."""
    topology = Topology(("a", "b"), 1, 2, "torchrun")
    assert torchrun_variables(topology, 3, "job", {}) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    chosen = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert torchrun_variables(topology, 3, "job", chosen)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_ranks_of_mpirun_get_torchruns_names() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "RANK": "of a launcher around this one",
    }
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [mpi_rank_variables(environ)[name] for name in names] == ["3", "4", "1", "2"]


def test_null_is_an_empty_text_as_in_the_toolkit() -> None:
    """Else `if args.resume_from:` of a ported script changes its meaning."""
    environment = replace(ENVIRONMENT, hyperparameters={"resume_from": None, "list": [None]})
    variables = platform_variables(environment, TOPOLOGY, [])
    assert (variables["SM_HP_RESUME_FROM"], variables["SM_HP_LIST"]) == ("", "[null]")
    assert json.loads(variables["SM_HPS"])["resume_from"] is None


def test_what_is_not_known_does_not_hide_what_is_set() -> None:
    variables = platform_variables(replace(ENVIRONMENT, framework={}, job_name=""), TOPOLOGY, [])
    assert not {"SAGEMAKER_REGION", "SAGEMAKER_JOB_NAME"} & set(variables)


def test_hyperparameters_become_sorted_arguments() -> None:
    values = {"lr": 0.001, "epochs": 3, "flag": True, "name": "a b", "e": 1, "none": None, "d": {"b": 1, "a": None}}
    assert script_arguments(values) == [
        "-d", '{"a": null, "b": 1}',
        "-e", "1", "--epochs", "3", "--flag", "True", "--lr", "0.001", "--name", "a b", "--none", "",
    ]  # fmt: skip


def test_trap_21_mp_parameters_in_the_toolkits_form() -> None:
    values = {"mp_parameters": {"partitions": 2, "ddp": True, "microbatches": 4}, "epochs": 1}
    assert script_arguments(values) == ["--epochs", "1"]
    assert script_arguments(values, pass_mp_parameters=True) == [
        "--epochs", "1", "--mp_parameters", "ddp=True,microbatches=4,partitions=2",
    ]  # fmt: skip
