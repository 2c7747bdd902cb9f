"""The parts of running in containers that need no engine; the rest is in tests/docker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from smpkit.config.job import JobConfig
from smpkit.errors import LaunchError, UsageError
from smpkit_estimator.docker import Containers
from smpkit_estimator.image import Recipe, build_image, pack_wheel
from smpkit_estimator.local import plan_local_run

PARAMETERS = {"pipeline_parallel_degree": 4, "ddp": True}


def containers(tmp_path: Path, hosts: int, arguments: Sequence[str] = (), **settings: object) -> Containers:
    (tmp_path / "train.py").touch()
    block = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": PARAMETERS}}}
    job = JobConfig.model_validate({"entry_point": "train.py", "distribution": block, **settings})
    plan = plan_local_run(job, tmp_path, hosts=hosts)
    assert plan.ranks == 4
    return Containers(plan, "image", tmp_path / "run", arguments)


def with_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> Containers:
    """A run of one host, for which a shell script is the `docker` command."""
    engine = tmp_path / "bin" / "docker"
    engine.parent.mkdir()
    engine.write_text(f"#!/bin/sh\n{does}\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:/usr/bin:/bin")
    (tmp_path / "run").mkdir()
    return containers(tmp_path, 1)


def test_ranks_are_spread_over_the_containers(tmp_path: Path) -> None:
    containers(tmp_path, 2).lay_out()
    config = tmp_path / "run" / "hosts" / "algo-2" / "config"
    resources = json.loads((config / "resourceconfig.json").read_text())
    assert (resources["hosts"], resources["current_host"]) == (["algo-1", "algo-2"], "algo-2")
    sent = json.loads((config / "hyperparameters.json").read_text())
    assert sent["sagemaker_smpkit_processes_per_host"] == "2"


def test_dependencies_lie_beside_the_script(tmp_path: Path) -> None:
    job, shared = tmp_path / "job", tmp_path / "shared"
    job.mkdir()
    shared.mkdir()
    (shared / "blocks.py").touch()
    run = containers(job, 1, dependencies=["../shared"])
    run.lay_out()
    code = job / "run" / "hosts" / "code"
    assert sorted(path.name for path in code.iterdir()) == ["shared", "train.py"]
    assert f"type=bind,source={code},target=/opt/ml/code,readonly" in run.command("algo-1")


def test_values_of_variables_are_in_no_command_line_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDK v2 writes keys into a Compose file that it leaves; here nothing is written."""
    monkeypatch.setenv("MINE", "secret too")
    secrets = {"HIDDEN": {"variable": "MINE"}}
    run = containers(tmp_path, 1, ["--epochs", "2"], environment={"TOKEN": "secret"}, secrets=secrets)
    run.lay_out()
    assert not any("secret" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    command = run.command("algo-1")
    assert "compose" not in command
    assert command[command.index("HIDDEN") - 1] == command[command.index("TOKEN") - 1] == "--env"
    assert not any("secret" in word for word in command)
    assert command[-5:] == ["image", "train", "--", "--epochs", "2"]


def test_a_path_cannot_add_to_a_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor to those of the container that gives files back: a folder `x,source=/etc` would have given away /etc."""
    folder = tmp_path / 'a,readonly"b'
    folder.mkdir()
    shown, run = str(folder).replace('"', '""'), containers(folder, 1)
    mounts = [word for word in run.command("algo-1") if "target=/opt/ml/code" in word]
    assert mounts == [f'type=bind,"source={shown}",target=/opt/ml/code,readonly']
    words: list[str] = []
    monkeypatch.setattr("smpkit_estimator.docker._quietly", lambda *command: words.extend(command))
    monkeypatch.setattr("os.getuid", lambda: 1000)
    run._give_back()
    assert f'type=bind,"source={shown}/run","target=/mnt{shown}/run"' in words


def test_a_run_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without networks: the folder of the run has what it had before."""
    run = with_engine(tmp_path, monkeypatch, '[ "$1" != network ] || { echo "no network" >&2; exit 1; }')
    with pytest.raises(LaunchError, match="no network"):
        run.run()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("name", ["INT", "HUP"])
def test_ctrl_c_before_a_container_runs_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A signal has no effect then; sent once only, the job would go on to its own end. HUP: the terminal was closed."""
    runs, stopped = tmp_path / "runs", tmp_path / "stopped"
    does = f"""case $1 in
  run)
    kill -{name} $PPID; sleep 0.5; touch {runs}
    for each in $(seq 50); do [ ! -e {stopped} ] || exit 0; sleep 0.1; done
    exit 9;;
  kill) [ ! -e {runs} ] || touch {stopped};;
esac"""
    run = with_engine(tmp_path, monkeypatch, does)
    before = signal.signal(signal.SIGHUP, lambda *_: None)  # or a run that forgot it would end pytest
    try:
        done = run.run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (done.exit_code, done.stopped) == (0, True)


def test_an_engine_that_ends_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, twice, `smpkit run --docker` waited without end for an engine that was frozen."""
    does = "case $1 in run) kill -INT $PPID; sleep 0.3; kill -INT $PPID; exec sleep 30;; kill) exec sleep 30;; esac"
    run = with_engine(tmp_path, monkeypatch, does)
    monkeypatch.setattr("smpkit_estimator.docker._COMMAND_SECONDS", 0.5)
    with pytest.raises(LaunchError, match=r"the Docker engine did not end the containers within 0\.5 s of SIGKILL"):
        run.run()


def test_the_wheel_is_what_runs_here(tmp_path: Path) -> None:
    wheel = pack_wheel(tmp_path)
    assert wheel.read_bytes() == pack_wheel(tmp_path).read_bytes()
    options = ["--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    names = [
        "smpkit/torch/__init__.py",
        "smpkit/py.typed",
        "smpkit_container/Dockerfile",
        "smpkit_container/install.sh",
        "smpkit/testing/simulated_device/source/library.cpp",
        "smpkit/testing/simulated_device/source/order.h",
    ]
    assert all((tmp_path / "site" / name).is_file() for name in names)


def test_recipes_with_missing_files_are_refused_before_docker_is_asked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder of wheels"):
        build_image(Recipe(wheels=tmp_path / "none"))
    with pytest.raises(UsageError, match="there is no file of certificates"):
        build_image(Recipe(authority=tmp_path / "none.pem"))


def test_a_run_takes_its_containers_and_its_network_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    with_engine(tmp_path, monkeypatch, f'echo "$@" >> {asked}').run()
    commands = asked.read_text().splitlines()
    [name] = [command.split()[-1] for command in commands if command.startswith("network create")]
    assert commands.index(f"rm --force {name}-algo-1") < commands.index(f"network rm {name}")


def test_a_run_has_a_result_although_the_engine_hangs_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recursive `chown` of large checkpoints can take longer than a command may, too."""
    run, real = with_engine(tmp_path, monkeypatch, "true"), subprocess.run

    def hanging(command: Sequence[str], **options: Any) -> Any:
        if "rm" in command:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", hanging)
    assert run.run().exit_code == 0
    assert not (tmp_path / "run" / "hosts").exists()
