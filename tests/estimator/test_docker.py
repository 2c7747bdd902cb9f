"""The parts of running in containers that need no engine; the rest is in tests/docker."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit.config.job import JobConfig
from smpkit.errors import UsageError
from smpkit_estimator.docker.hosts import Host, Run, lay_out, start_command
from smpkit_estimator.docker.image import Recipe, build_image, pack_wheel
from smpkit_estimator.docker.run import merge
from smpkit_estimator.local import plan_local_run

PARAMETERS = {"pipeline_parallel_degree": 4, "ddp": True}


def run_of(tmp_path: Path, hosts: int, **settings: object) -> Run:
    (tmp_path / "train.py").touch()
    block = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": PARAMETERS}}}
    job = JobConfig.model_validate({"entry_point": "train.py", "distribution": block, **settings})
    plan = plan_local_run(job, tmp_path, hosts=hosts)
    names = [f"algo-{number}" for number in range(1, hosts + 1)]
    hosts_of = tuple(Host(n, f"run-1-{n}", tmp_path / n) for n in names)
    return Run(plan, "image", "run-1", tmp_path, hosts_of, plan.checkpoints or tmp_path / "checkpoints")


def test_ranks_are_spread_over_the_containers(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    lay_out(run)
    config = tmp_path / "algo-2" / "input" / "config"
    resources = json.loads((config / "resourceconfig.json").read_text())
    assert (resources["hosts"], resources["current_host"]) == (["algo-1", "algo-2"], "algo-2")
    sent = json.loads((config / "hyperparameters.json").read_text())
    assert sent["sagemaker_smpkit_processes_per_host"] == "2"
    assert run.plan.ranks == 4


def test_dependencies_lie_beside_the_script(tmp_path: Path) -> None:
    job, shared = tmp_path / "job", tmp_path / "shared"
    job.mkdir()
    shared.mkdir()
    (shared / "blocks.py").write_text("x = 1")
    run = run_of(job, 1, dependencies=["../shared"])
    run = replace(run, tree=tmp_path / "tree")
    lay_out(run)
    assert sorted(path.name for path in (tmp_path / "tree" / "code").iterdir()) == ["shared", "train.py"]
    words = start_command(run, run.hosts[0], [], {}).words
    assert f"type=bind,source={tmp_path}/tree/code,target=/opt/ml/code,readonly" in words


def test_values_of_variables_are_in_no_command_line_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Surprise 10: SDK v2 writes keys into a Compose file that it leaves; here nothing is written."""
    monkeypatch.setenv("MINE", "secret too")
    run = run_of(tmp_path, 1, environment={"TOKEN": "secret"}, secrets={"HIDDEN": {"variable": "MINE"}})
    lay_out(run)
    assert not any("secret" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    command = start_command(run, run.hosts[0], ["--epochs", "2"], {})
    assert "compose" not in command.words
    assert command.environ["TOKEN"] == "secret"
    assert command.environ["HIDDEN"] == "secret too"
    assert command.words[command.words.index("HIDDEN") - 1] == "--env"
    assert not any("secret" in word for word in command.words)
    assert command.words[-5:] == ("image", "train", "--", "--epochs", "2")


def test_a_path_cannot_add_to_a_mount(tmp_path: Path) -> None:
    folder = tmp_path / 'a,readonly"b'
    folder.mkdir()
    run = run_of(folder, 1)
    mounts = [word for word in start_command(run, run.hosts[0], [], {}).words if "target=/opt/ml/code" in word]
    assert mounts == [f'type=bind,"source={str(folder).replace(chr(34), chr(34) * 2)}",target=/opt/ml/code,readonly']


def test_files_that_hosts_wrote_differently_are_told(tmp_path: Path) -> None:
    for host, text in (("algo-1", "one"), ("algo-2", "two")):
        (tmp_path / host / "deep").mkdir(parents=True)
        (tmp_path / host / "deep" / "same").write_text("same")
        (tmp_path / host / "deep" / "own").write_text(text)
        (tmp_path / host / f"{host}.txt").write_text(text)
    target = tmp_path / "model"
    clashes = merge([(host, tmp_path / host) for host in ("algo-1", "algo-2")], target)
    assert clashes == ["deep/own (of algo-2)"]
    assert (target / "deep" / "own").read_text() == "one"
    assert sorted(path.name for path in target.rglob("*.txt")) == ["algo-1.txt", "algo-2.txt"]


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
