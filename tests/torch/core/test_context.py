from __future__ import annotations

import pytest

from smpkit.errors import UsageError
from smpkit.torch.core.context import Launch, launch_from

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [(TORCHRUN, "torchrun"), (OPEN_MPI, "Open MPI"), (SLURM, "SLURM"), (PMI, "PMI")],
    ids=["torchrun", "open-mpi", "slurm", "pmi"],
)
def test_every_launcher_tells_the_same_place(environment: dict[str, str], launcher: str) -> None:
    launch = launch_from(environment)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (5, 8, 1, 4)
    assert launch.launcher == launcher
    assert not launch.single_host


def test_no_launcher_is_a_world_of_one() -> None:
    assert launch_from({"PATH": "/bin"}) == Launch(0, 1, 0, 1)


def test_a_slurm_batch_script_without_srun_is_one_process() -> None:
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert launch_from(batch).world_size == 1
    assert launch_from({**batch, "SLURM_STEP_ID": "batch", "SLURM_STEP_NUM_TASKS": "4"}).world_size == 1


def test_torchrun_inside_srun_is_torchruns() -> None:
    assert launch_from({**SLURM, **TORCHRUN, "RANK": "2", "LOCAL_RANK": "2"}).rank == 2


@pytest.mark.parametrize(
    ("per_node", "node", "size"), [("4(x2)", "1", 4), ("4,3", "1", 3), ("2(x2),3", "2", 3), ("8", "0", 8)]
)
def test_slurms_run_lengths_are_read(per_node: str, node: str, size: int) -> None:
    environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node}
    assert launch_from(environment).local_size == size


def test_the_meeting_point_and_the_name_of_the_job_are_taken_over() -> None:
    launch = launch_from({**OPEN_MPI, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert (launch.master_address, launch.master_port, launch.agent_store) == ("node0", 1234, False)
    assert launch.job_id == "prterun-host-77@1"
    assert launch_from({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "99"}, "contradicts"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_WORLD_SIZE is not"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is outside WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is outside LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, "contradicts"),
        ({**TORCHRUN, "RANK": "0"}, "LOCAL_RANK=1 of LOCAL_WORLD_SIZE=4 contradicts RANK=0"),
        ({**TORCHRUN, "RANK": "two"}, "RANK is `two`, which is not a number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is `-1`"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT is `99999`"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is set but empty"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is set but OMPI_COMM_WORLD_RANK is not"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE is `many`"),
        ({**SLURM, "SLURM_NODEID": "7"}, "SLURM_NODEID is 7"),
    ],
    ids=lambda value: value.replace("`", "")[:40] if isinstance(value, str) else "",
)
def test_partial_or_contradictory_variables_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        launch_from(environment)
    assert words in caught.value.message
    assert caught.value.hint or "form" in words or "SLURM" in words


def test_open_mpi_may_count_the_ranks_of_a_host_in_another_order() -> None:
    """As `mpirun --oversubscribe -np 4` did on a host of two cores."""
    place = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    launch = launch_from({**OPEN_MPI, **place, "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (launch.rank, launch.local_rank) == (1, 2)
