"""Jobs that begin on a real Slurm, go on elsewhere from their checkpoints, and come back: losses as if nothing was."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from smpkit.cli.main import cli
from smpkit.testing import FakeKubernetes, FakeSageMaker
from smpkit_estimator import sagemaker_backend
from smpkit_estimator.sagemaker_backend import SageMaker
from tests.container.test_peers import free_ports
from tests.job_contract import a_report_of_it, uninterrupted
from tests.slurm.conftest import PIPELINE, User
from tests.slurm.test_slurm import losses

STEPS = {"steps": 6, "seconds": 1}


def stopped_on_slurm(user: User, name: str) -> None:
    """Begin a job whose checkpoints lie in a folder of their own, and stop it after a step or two."""
    user.write(distribution=PIPELINE, hyperparameters=STEPS, checkpoints=str(user.folder / "shared" / "checkpoints"))
    user.run("submit", "job.yaml", "--name", name)
    user.until_logged(name, "step 2 on")
    stopped = user.run("stop", name, "--wait")
    assert "newest checkpoint: " in stopped.stderr


def job_there(user: User, name: str, **changes: Any) -> None:
    """Write a job file like the one for Slurm, with other values; None removes one."""
    job = {**yaml.safe_load((user.folder / "job.yaml").read_text()), **changes}
    (user.folder / name).write_text(yaml.safe_dump({key: each for key, each in job.items() if each is not None}))


@pytest.mark.slow
def test_a_job_goes_on_on_kubernetes_and_comes_back(user: User, tmp_path: Path) -> None:
    """The pods see the folder that the nodes see, so nothing is copied; the job file for there names no checkpoints."""
    shared = user.folder / "shared"
    stopped_on_slurm(user, "old")
    with free_ports() as port, FakeKubernetes() as cluster:
        user.environ["KUBECONFIG"] = str(cluster.write_kubeconfig(tmp_path / "kubeconfig"))
        options = {"port": port, "volumes": [{"mount": str(shared), "host_path": str(shared)}]}
        there = {"backend": {"kubernetes": options}, "output": str(shared / "out"), "image": "registry.io/smpkit:1"}
        job_there(user, "there.yaml", checkpoints=None, **there)
        went = user.run("resume", "old", "--with", "there.yaml", "--name", "mid", "--backend", "slurm")
        assert f"Resuming from {shared / 'checkpoints'}" in went.stderr
        [run] = [run for name, run in cluster.controller.runs.items() if name.startswith("mid-0")]
        user.until(lambda: any(b"resumed at step" in line for _, line in tuple(run.lines)), "the pods to go on")
        user.run("stop", "mid", "--wait", "--backend", "kubernetes")
        job_there(user, "back.yaml", checkpoints=None)
        came = user.run("resume", "mid", "--with", "back.yaml", "--name", "new", "--backend", "kubernetes")
        assert f"Resuming from {shared / 'checkpoints' / 'step_'}" in came.stderr
    user.run("wait", "new")
    assert "resumed at step" in user.log("new")
    assert losses(user, "new") == uninterrupted()


@pytest.mark.slow
def test_a_job_goes_on_on_sagemaker_and_comes_back(user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are copied into S3, a platform played by hand runs the request, and they are copied back."""
    fake = FakeSageMaker()
    monkeypatch.setattr(sagemaker_backend, "open_sagemaker", lambda _: SageMaker(fake))
    monkeypatch.chdir(user.folder)
    for name, value in user.environ.items():
        monkeypatch.setenv(name, value)
    stopped_on_slurm(user, "old")
    torchrun = {**PIPELINE, "torch_distributed": {"enabled": True, "processes_per_host": 2}}
    there = {
        "backend": None,
        "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest",
        "role": "arn:aws:iam::123456789012:role/SM",
        "output": "s3://bucket/out",
        "compute": {"instance_type": "ml.p3.8xlarge", "instance_count": 1},
        "distribution": torchrun,
        "hyperparameters": {"steps": 4},
    }
    job_there(user, "there.yaml", checkpoints="s3://bucket/ckpt", **there)
    words = ["resume", "old", "--with", "there.yaml", "--to", "sagemaker", "--backend", "slurm", "--name"]
    dry = smpkit(*words, "mid", "--dry-run")
    assert "note: copies first the checkpoint `step_" in dry.stderr
    assert not fake.storage.objects
    went = smpkit(*words, "mid")
    assert f" from {user.folder / 'shared' / 'checkpoints'} to s3://bucket/ckpt" in went.stderr
    assert "resumed at step" in played(fake, "mid", tmp_path / "ml")
    monkeypatch.setenv("SMPKIT_BACKEND", "sagemaker")
    a_report_of_it(smpkit, "mid", steps=4)
    monkeypatch.setenv("SMPKIT_BACKEND", "slurm")
    elsewhere = user.folder / "shared" / "others"
    job_there(user, "back.yaml", checkpoints=str(elsewhere))
    came = smpkit("resume", "mid", "--with", "back.yaml", "--to", "slurm", "--backend", "sagemaker", "--name", "new")
    assert "Copying the checkpoint `step_4" in came.stderr
    user.run("wait", "new")
    assert "resumed at step 4" in user.log("new")
    assert losses(user, "new") == uninterrupted()


def smpkit(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == code, f"{arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    return done


def played(fake: FakeSageMaker, name: str, base: Path) -> str:
    """Do with a request what the platform does: sources and checkpoints down, the launcher, checkpoints up again."""
    request = fake.jobs[name].request
    config, code, kept = base / "input" / "config", base / "code", base / "checkpoints"
    for folder in (config, code, kept):
        folder.mkdir(parents=True)
    prefix = request["CheckpointConfig"]["S3Uri"].rstrip("/") + "/"
    for uri, each in fake.storage.objects.items():
        if uri.startswith(prefix):
            target = kept / uri.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(each.content)
    sources = fake.storage.objects[json.loads(request["HyperParameters"]["sagemaker_submit_directory"])]
    with tarfile.open(fileobj=io.BytesIO(sources.content)) as archive:
        archive.extractall(code)
    (config / "hyperparameters.json").write_text(json.dumps(request["HyperParameters"]))
    (config / "checkpointconfig.json").write_text(json.dumps({"LocalPath": str(kept)}))
    results = base / "output" / "data"
    around = {
        "SMPKIT_BASE_DIR": str(base),
        "SMPKIT_RUN_DIR": str(results / "run"),
        "SMPKIT_DIE_WITH_PARENT": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "smpkit_container", "train"],
        env={**os.environ, **around}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for path in kept.rglob("*"):
        if path.is_file():
            fake.storage.put(prefix + str(path.relative_to(kept)), path.read_bytes())
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in results.iterdir():
            archive.add(path, path.name)
    place = request["OutputDataConfig"]["S3OutputPath"]
    fake.storage.put(f"{place}/{name}/output/output.tar.gz", packed.getvalue())
    return done.stdout
