"""`smpkit doctor` fails on what the job in question needs, and on nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from smpkit import __version__ as smpkit_version
from smpkit.cli import _machine as machine
from tests.cli.conftest import Smpkit

LOCAL = "entry_point: train.py\n"
MPI = LOCAL + "distribution: {mpi: {enabled: true, processes_per_host: 2}}\n"
MANAGED = MPI + "compute: {instance_type: ml.p4d.24xlarge}\n"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A machine without region, torch, mpirun, docker, compiler and GPU; write a job file of the text."""
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("smpkit_container.mpi.sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(machine, "version_of", lambda _: None)
    (tmp_path / "train.py").touch()

    def write(text: str) -> str:
        (tmp_path / "job.yaml").write_text(text)
        return str(tmp_path / "job.yaml")

    return write


def test_without_a_job_nothing_is_missing(bare: Callable[[str], str], smpkit: Smpkit) -> None:
    """Who only trains on a laptop was told that no AWS region is set, as a problem."""
    result = smpkit("doctor", code=0)
    assert result.stderr == "no problems\n"
    assert "– no AWS region is set" in result.stdout
    assert "– no GPU: ranks run on the CPU" in result.stdout
    assert "https://download.pytorch.org/whl/cpu" in result.stdout


@pytest.mark.parametrize(
    ("job", "expected"), [(LOCAL, ["torch"]), (MPI, ["torch", "mpirun"]), (MANAGED, ["credentials"])]
)
def test_a_problem_is_what_the_job_needs(
    job: str, expected: list[str], bare: Callable[[str], str], smpkit: Smpkit
) -> None:
    found = json.loads(smpkit("doctor", bare(job), "--json", code=1).stdout)
    assert [finding["what"] for finding in found if finding["state"] == "problem"] == expected


@pytest.mark.parametrize(("version", "state"), [("2.6.0+cu124", "problem"), ("2.11.0", "ok"), ("3.0a0", "ok")])
def test_a_torch_that_is_too_old_is_named(
    version: str, state: str, bare: Callable[[str], str], smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training images of AWS have had older ones, beside which smpkit is installed without its extra."""
    monkeypatch.setattr(machine, "version_of", lambda name: version if name == "torch" else None)
    finding = json.loads(smpkit("doctor", bare(LOCAL), "--json").stdout)[1]
    assert (finding["what"], finding["state"]) == ("torch", state)
    assert ("is too old: smpkit needs 2.11 or newer" in finding["text"]) == (state == "problem")


def test_a_profile_that_is_not_here_hides_nothing_of_the_machine(
    bare: Callable[[str], str], smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nope")
    shown = smpkit("doctor", code=0).stdout
    assert "– no GPU" in shown
    assert "– cannot use AWS: the config profile (nope) could not be found" in shown
    assert smpkit("doctor", bare(MANAGED), code=2).stderr.startswith("error: cannot use AWS")


def test_everything_a_run_may_meet_is_looked_at(smpkit: Smpkit) -> None:
    found = {finding["what"] for finding in json.loads(smpkit("doctor", "--json").stdout)}
    assert found >= {"torch", "gpus", "mpirun", "docker", "compiler", "credentials"}


def test_the_first_gpu_and_a_small_shared_memory_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 570.1'\necho 'NVIDIA H100, 81559 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**20, "total": 2**26}))
    found = {finding.what: finding for finding in machine.check_machine(shared=tmp_path)}
    assert found["gpus"].text == "2 GPUs: NVIDIA H100, 81559 MiB, driver 570.1"
    assert found["shared memory"].text.endswith("1.0 MiB free of 64.0 MiB")
    assert found["shared memory"].hint is not None


def test_the_versions_are_text_or_json(smpkit: Smpkit) -> None:
    text = smpkit("doctor", "--report").stdout
    found = json.loads(smpkit("doctor", "--report", "--json").stdout)
    assert found["smpkit"] == smpkit_version
    assert text.splitlines() == [f"{name} {version}" for name, version in found.items()]
