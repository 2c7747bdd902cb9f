from __future__ import annotations

import pytest

from smpkit.errors import LaunchError
from smpkit_container import ssh
from smpkit_container.command import mpirun_command
from smpkit_container.gathering import Gathered, gather
from smpkit_container.topology import Topology


def test_mpi_on_one_host_needs_neither_ssh_nor_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surprise 8: AWS's toolkit starts sshd on one host, runs every script through mpi4py, and sleeps for 30 s."""
    monkeypatch.setattr(ssh, "_program", lambda name: pytest.fail(f"{name} was asked for"))
    topology = Topology(("algo-1",), 0, 2, "mpirun")
    with gather(topology, seconds=0.1) as gathered:
        assert gathered == Gathered()
    assert not any("mpi4py" in word for word in mpirun_command("mpirun", topology, ["python", "train.py"]))


def test_mpi_on_two_hosts_without_ssh_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    topology = Topology(("localhost", "other"), 0, 2, "mpirun")
    with pytest.raises(LaunchError, match="`ssh-keygen` was not found") as caught, gather(topology, seconds=0.1):
        pass
    assert "torch_distributed" in str(caught.value.hint)
