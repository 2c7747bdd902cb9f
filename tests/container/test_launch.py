from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smpkit.errors import ConfigError, LaunchError, SmpkitError, UnsupportedError
from smpkit_container.__main__ import main
from smpkit_container.console import Console
from smpkit_container.environment import Environment, Folders, Resources
from smpkit_container.launch import launch, patience_from


def test_waits_can_be_set_in_seconds() -> None:
    patience = patience_from({"SMPKIT_GRACE_SECONDS": "5", "SMPKIT_START_SECONDS": "2.5"})
    assert (patience.grace, patience.start) == (5.0, 2.5)
    assert patience_from({}).grace == 110


@pytest.mark.parametrize("text", ["long", "-1", "inf", "nan"])
def test_waits_without_end_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a number of seconds"):
        patience_from({"SMPKIT_GRACE_SECONDS": text})


def job(base: Path, framework: dict[str, Any], resources: Resources | None = None) -> Environment:
    (base / "code").mkdir(exist_ok=True)
    return Environment(Folders(base), framework=framework, resources=resources or Resources())


@pytest.mark.parametrize(
    ("framework", "error", "message"),
    [
        ({}, LaunchError, "names no entry point"),
        ({"sagemaker_program": "no.py"}, LaunchError, "`no.py` is not in"),
        ({"sagemaker_program": "run.sh"}, UnsupportedError, "is not a Python script"),
    ],
    ids=["none", "missing", "shell"],
)
def test_entry_points_that_cannot_run(
    tmp_path: Path, framework: dict[str, Any], error: type[SmpkitError], message: str
) -> None:
    environment = job(tmp_path, framework)
    (tmp_path / "code" / "run.sh").touch()
    with pytest.raises(error, match=message):
        launch(environment, {}, Console(io.BytesIO(), io.BytesIO(), terminal=False, colour=False))


def test_mpirun_over_several_hosts_is_refused_by_name(tmp_path: Path) -> None:
    resources = Resources(hosts=("algo-1", "algo-2"))
    environment = job(tmp_path, {"sagemaker_program": "train.py", "sagemaker_mpi_enabled": True}, resources)
    (tmp_path / "code" / "train.py").touch()
    with pytest.raises(UnsupportedError, match="mpirun over 2 hosts needs ssh"):
        launch(environment, {}, Console(io.BytesIO(), io.BytesIO(), terminal=False, colour=False))


def test_the_program_tells_bad_files_and_leaves_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text("{")
    assert main(["train"], {"SMPKIT_BASE_DIR": str(tmp_path)}) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err
    assert "cannot be read as JSON" in (tmp_path / "output" / "failure").read_text()


def test_the_program_takes_train_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"], {}) == 2
    assert capsys.readouterr().err.startswith("usage: python -m smpkit_container")


def test_two_hosts_with_torchrun_form_one_world(tmp_path: Path) -> None:
    """Two launchers, as on two machines; both names lead here. Ranks are numbered over both."""
    processes = []
    reservation = socket.socket()  # bound, not listening: keeps the port for the store, which sets SO_REUSEADDR too
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    port = reservation.getsockname()[1]
    for number, host in enumerate(("localhost", "127.0.0.2")):
        base = tmp_path / str(number)
        config = base / "input" / "config"
        config.mkdir(parents=True)
        (base / "code").mkdir()
        (base / "code" / "train.py").write_text(
            "import os, torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "x = torch.ones(1); dist.all_reduce(x)\n"
            "print(os.environ['SM_CURRENT_HOST'], os.environ['RANK'], x.item())\n"
            "dist.destroy_process_group()\n"
        )
        values = {"sagemaker_program": "train.py", "mp_parameters": {"ddp": True, "ddp_port": port}}
        encoded = {name: json.dumps(value) for name, value in values.items()}
        (config / "hyperparameters.json").write_text(json.dumps(encoded))
        resources = {"hosts": ["localhost", "127.0.0.2"], "current_host": host, "network_interface_name": "lo"}
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        environ = {**os.environ, "SMPKIT_BASE_DIR": str(base), "SMPKIT_DIE_WITH_PARENT": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "smpkit_container", "train"]
        processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    results = [process.communicate(timeout=60)[0] for process in processes]
    reservation.close()
    assert [process.returncode for process in processes] == [0, 0]
    assert results == ["[rank 0] localhost 0 2.0\n", "[rank 1] 127.0.0.2 1 2.0\n"]


def test_a_failure_file_of_the_script_is_kept_and_an_older_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "failure").write_text("of an earlier run")
    (tmp_path / "code" / "train.py").write_text("import sys; sys.exit(4)")
    framework = {"sagemaker_program": "train.py", "sagemaker_mpi_enabled": True}
    console = Console(io.BytesIO(), io.BytesIO(), terminal=False, colour=False)
    assert launch(job(tmp_path, framework), os.environ, console) == 4
    failure = tmp_path / "output" / "failure"
    assert failure.read_text().startswith("the script exited with code 4")
    own = "import os, sys; open(os.environ['SM_OUTPUT_FAILURE'], 'w').write('mine'); sys.exit(4)"
    (tmp_path / "code" / "train.py").write_text(own)
    assert launch(job(tmp_path, framework), os.environ, console) == 4
    assert failure.read_text() == "mine"
