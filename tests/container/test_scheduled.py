"""A host among those that a scheduler has started: what its variables say, and what lies below its base folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smpkit.errors import LaunchError
from smpkit_container.__main__ import described_hosts, lay_out, leave_message, main
from smpkit_container.environment import Environment
from smpkit_container.topology import read_topology

HOSTS = {"SMPKIT_HOSTS": "n1 n2 n3", "SMPKIT_FIRST_HOST": "10.0.0.1", "SMPKIT_PORT": "12000"}


@pytest.mark.parametrize("name", ["SLURM_NODEID", "JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_NODE_INDEX"])
def test_a_scheduler_says_which_host_this_is(tmp_path: Path, name: str) -> None:
    hosts = described_hosts({**HOSTS, name: "1"})
    environment = Environment.read(tmp_path, {}, num_gpus=2, num_cpus=2, hosts=hosts)
    topology = read_topology(environment)
    assert (topology.hosts, topology.node_rank, topology.world_size) == (("n1", "n2", "n3"), 1, 6)
    assert (topology.master, topology.port) == ("10.0.0.1", 12000)
    assert described_hosts({}) == {}


@pytest.mark.parametrize(
    "index", [{}, {"SLURM_NODEID": "3"}, {"SLURM_NODEID": "x"}], ids=["none", "too high", "no number"]
)
def test_a_host_that_nobody_knows_is_refused(index: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"none of SLURM_NODEID, .* is the number of one of 3 hosts"):
        described_hosts({**HOSTS, **index})


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(LaunchError, match="SMPKIT_PORT is 'abc'"):
        described_hosts({**HOSTS, "SLURM_NODEID": "1", "SMPKIT_PORT": "abc"})


def test_a_host_has_a_base_of_its_own_with_places_that_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "input" / "config").mkdir(parents=True)
    (tmp_path / "input" / "config" / "hyperparameters.json").write_text("{}")
    places = {"input": str(tmp_path / "input"), "model": str(tmp_path / "out" / "model")}
    told = {"SMPKIT_BASE_DIR": f"{tmp_path}/nodes/{{host}}", "SMPKIT_PLACES": json.dumps(places), "KEY": "hush"}
    (tmp_path / "variables.json").write_text(json.dumps(told))
    environ = {**HOSTS, "SLURM_NODEID": "2", "SMPKIT_VARIABLES": str(tmp_path / "variables.json")}
    for _ in range(2):  # the second attempt of a job that was queued again finds what the first one left
        found = lay_out(environ)
        base = tmp_path / "nodes" / "n3"
        assert (found["SMPKIT_BASE_DIR"], found["KEY"]) == (str(base), "hush")
        assert not (base / "output" / "failure").exists()
        (base / "output" / "failure").write_text("ValueError")
        assert (base / "input" / "config" / "hyperparameters.json").read_text() == "{}"
        (base / "model" / "weights").touch()
    assert (tmp_path / "out" / "model" / "weights").is_file()
    leave_message(base, {**found, "SMPKIT_TERMINATION_MESSAGE": str(tmp_path / "message")})
    assert (tmp_path / "message").read_text() == "ValueError"


def test_a_job_that_was_stopped_before_its_launcher_came_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "stopped").touch()
    environ = {**HOSTS, "SLURM_NODEID": "0", "SMPKIT_BASE_DIR": str(tmp_path / "ml")}
    assert main(["train"], {**environ, "SMPKIT_STOP_FILE": str(tmp_path / "stopped")}) == 143


def test_a_host_without_its_variables_leaves_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {"SMPKIT_BASE_DIR": f"{tmp_path}/ml", "SMPKIT_TERMINATION_MESSAGE": f"{tmp_path}/message"}
    assert main(["train"], {**HOSTS, **places}) == 1
    assert "is the number of one of 3 hosts" in capsys.readouterr().err
    assert "is the number of one of 3 hosts" in (tmp_path / "message").read_text()
