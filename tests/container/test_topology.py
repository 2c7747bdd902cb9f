from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smpkit.errors import ConfigError
from smpkit_container.environment import Environment, Folders, Resources
from smpkit_container.topology import read_topology

MPI = "sagemaker_mpi_num_of_processes_per_host"
TORCHRUN = "sagemaker_smpkit_processes_per_host"


def environment(
    framework: dict[str, Any] | None = None,
    parameters: dict[str, Any] | None = None,
    num_gpus: int = 0,
    hosts: tuple[str, ...] = ("algo-1",),
    current: str = "algo-1",
) -> Environment:
    return Environment(
        folders=Folders(Path("/opt/ml")),
        framework=framework or {},
        hyperparameters={"mp_parameters": parameters} if parameters else {},
        resources=Resources(hosts=hosts, current_host=current, interface="eth0"),
        num_gpus=num_gpus,
    )


@pytest.mark.parametrize(
    ("framework", "parameters", "num_gpus", "expected"),
    [
        ({"sagemaker_mpi_enabled": True, MPI: 8}, {}, 4, 8),
        ({"sagemaker_mpi_enabled": True, MPI: "8"}, {}, 4, 8),
        ({TORCHRUN: 2, MPI: 8}, {}, 4, 2),
        ({"sagemaker_torch_distributed_enabled": True}, {}, 4, 4),
        ({}, {"partitions": 2}, 4, 4),
        ({}, {"partitions": 2, "tensor_parallel_degree": 3}, 0, 6),
        ({}, {"pipeline_parallel_degree": 4}, 0, 4),
        ({}, {}, 0, 1),
        ({"sagemaker_mpi_enabled": True, "sagemaker_torch_distributed_enabled": True}, {}, 0, 1),
    ],
    ids=["mpi", "mpi text", "torchrun", "torchrun on all gpus", "gpus", "degrees", "pipeline", "one", "mpi first"],
)
def test_processes_per_host(framework: Any, parameters: Any, num_gpus: int, expected: int) -> None:
    topology = read_topology(environment(framework, parameters, num_gpus))
    assert topology.processes_per_host == expected
    assert topology.launcher == ("mpirun" if "sagemaker_mpi_enabled" in framework else "torchrun")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many", [2]], ids=repr)
def test_numbers_of_processes_that_cannot_be_are_clean_errors(value: object) -> None:
    with pytest.raises(ConfigError, match="must be a whole number from 1 to 4096"):
        read_topology(environment({"sagemaker_mpi_enabled": True, MPI: value}))


def test_node_rank_is_the_place_in_the_hosts_as_given() -> None:
    """The platform sorts as text, so algo-10 comes before algo-2, on every host alike."""
    hosts = ("algo-1", "algo-10", "algo-2")
    topology = read_topology(environment({TORCHRUN: 4}, hosts=hosts, current="algo-2"))
    assert (topology.node_rank, topology.master, topology.world_size) == (2, "algo-1", 12)
    assert topology.host == "algo-2"


def test_ddp_port_is_the_meeting_port_and_one_host_is_reached_by_its_loopback_address() -> None:
    assert read_topology(environment(parameters={"ddp_port": 8888})).port == 8888
    topology = read_topology(environment())
    assert (topology.single_host, topology.master, topology.port) == (True, "127.0.0.1", None)


@pytest.mark.parametrize(
    ("value", "launcher"),
    [
        *((value, "mpirun") for value in (True, 1, "true", "True", "1")),
        *((value, "torchrun") for value in (False, 0, "false", "", None)),
    ],
)
def test_the_switch_for_mpi_is_read_as_sdk_v2_sends_it(value: Any, launcher: str) -> None:
    assert read_topology(environment({"sagemaker_mpi_enabled": value})).launcher == launcher


@pytest.mark.parametrize("value", ["yes please", 2, [], {"enabled": True}])
def test_a_switch_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="sagemaker_mpi_enabled: must be true or false"):
        read_topology(environment({"sagemaker_mpi_enabled": value}))


def test_a_shell_script_has_one_process_on_each_host(tmp_path: Path) -> None:
    framework = {"sagemaker_program": "train.sh", "sagemaker_smpkit_processes_per_host": 8}
    resources = Resources(("algo-1", "algo-2"), "algo-2")
    topology = read_topology(Environment(Folders(tmp_path), framework=framework, resources=resources, num_gpus=8))
    assert (topology.launcher, topology.node_rank, topology.world_size) == ("shell", 1, 2)
