"""The adapter for SDK v3, against the real SDK: its `ModelTrainer`, and the scripts that it sends along."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from smpkit.errors import ConfigError
from smpkit_container.environment import Environment
from smpkit_estimator.arguments import job_from_arguments
from smpkit_estimator.hyperparameters import for_trainer, hyperparameters, not_for_shell_files
from smpkit_estimator.sdk3_driver import smpkit_driver
from tests.estimator.golden.cases import IMAGE, MPI, REGION, ROLE, SMP

SDK3 = importlib.util.find_spec("sagemaker.train") if importlib.util.find_spec("sagemaker") else None
with_sdk3 = pytest.mark.skipif(
    SDK3 is None, reason="needs SageMaker's SDK v3; `scripts/test-sdk sdk3` installs and runs it"
)

VALUES = {"epochs": 3, "text": "a b", "flag": True}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "it's o'clock"}, "hyperparameters.name: has an apostrophe, which SDK v3 cannot carry"),
        ({"a.dotted": 1}, "hyperparameters.a.dotted: cannot be the name of a hyperparameter with SDK v3"),
    ],
)
def test_what_a_shell_file_cannot_hold_is_refused(values: dict[str, Any], message: str) -> None:
    """The file that SDK v3's script writes could not be loaded, on machines that are paid for."""
    job = job_from_arguments({"entry_point": "train.py", "hyperparameters": values})
    (problem,) = not_for_shell_files(for_trainer(job))
    assert str(problem).startswith(message)
    assert list(not_for_shell_files(for_trainer(job_from_arguments({"entry_point": "train.py"})))) == []


def adapter() -> Any:
    from smpkit_estimator.sdk3 import Smpkit

    return Smpkit(smp_options={"enabled": True, "parameters": SMP}, mpi_options=MPI)


@with_sdk3
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smp_options": {"enabled": True, "parameters": {"microbatchs": 1}}}, "did you mean `microbatches`"),
        ({"mpi_options": {"enabled": True, "process_per_host": 8}}, "did you mean `processes_per_host`"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    from smpkit_estimator.sdk3 import Smpkit

    with pytest.raises(ConfigError) as caught:
        Smpkit(**options)
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="at most 2,500"):
        adapter().hyperparameters("train.py", {"corpus": "x" * 3000})
    with pytest.raises(ConfigError, match="entry_point: is a shell script, which runs once on each host"):
        adapter().hyperparameters("train.sh")


@with_sdk3
def test_the_request_of_a_model_trainer(tmp_path: Path) -> None:
    """Every host gets our driver, and the hyperparameters that it starts all ranks from."""
    request, uploads = sent_by_model_trainer(tmp_path)
    got = request["HyperParameters"]
    assert json.loads(got["mp_parameters"]) == SMP
    assert (got["sagemaker_mpi_enabled"], got["sagemaker_mpi_num_of_processes_per_host"]) == ("true", "8")
    assert got["sagemaker_program"] == '"train.py"'
    assert not {"sagemaker_region", "sagemaker_job_name", "sagemaker_instance_type"} & set(got)
    assert request["ResourceConfig"]["InstanceCount"] == 2
    driver = next(key for key in uploads if key.endswith("distributed_drivers/smpkit_driver.py"))
    assert b"smpkit_container" in uploads[driver]
    start = next(text for key, text in uploads.items() if key.endswith("sm_train.sh"))
    assert b"\nexec $SM_PYTHON_CMD /opt/ml/input/data/sm_drivers/distributed_drivers/smpkit_driver.py\n" in start


LAUNCHER = """\
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("launcher", sys.argv[1:], os.getpid(), flush=True)
signal.pause()
"""
"""Stands in for `smpkit_container`, whose way with SIGTERM has tests of its own."""

CONTAINER = """\
mount -t tmpfs none /opt && mkdir -p /opt/ml/input && cp -r {tree}/. /opt/ml/input/ &&
exec env -i PATH={path} PYTHONPATH={modules} TRAINING_JOB_NAME=job /bin/bash -c "$0"
"""


@with_sdk3
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, to be a first process")
@pytest.mark.parametrize("there", [True, False], ids=["smpkit in the image", "not there"])
def test_sigterm_reaches_the_launcher_through_the_sdks_own_start_script(tmp_path: Path, there: bool) -> None:
    """The shell that SDK v3 makes the first process would keep SIGTERM, and the ranks would be killed."""
    from sagemaker.train.constants import DEFAULT_CONTAINER_ARGUMENTS

    request, uploads = sent_by_model_trainer(tmp_path)
    tree, modules = tmp_path / "tree", tmp_path / "modules"
    for key, content in uploads.items():
        place = tree / "data" / key.partition("/input/")[2]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    (tree / "config").mkdir()
    resources = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    resources["current_instance_type"] = "ml.p4d.24xlarge"
    contents = {"resourceconfig": resources, "inputdataconfig": {}, "hyperparameters": request["HyperParameters"]}
    for name, value in contents.items():
        (tree / "config" / f"{name}.json").write_text(json.dumps(value))
    modules.mkdir()
    if there:
        (modules / "smpkit_container").mkdir()
        (modules / "smpkit_container" / "__init__.py").touch()
        (modules / "smpkit_container" / "__main__.py").write_text(LAUNCHER)
    path = f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"
    # That of the virtual environment has smpkit, the one it was made from has not.
    python = Path(sys.executable) if there else Path(sys.executable).resolve()
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "pip3").symlink_to("python3")
    script = CONTAINER.format(tree=tree, path=path, modules=modules)
    # SageMaker replaces the image's entry point by `/bin/bash`, with these arguments.
    command = ["unshare", "--pid", "--fork", "--mount", "--mount-proc", "/bin/bash", "-ec", script]
    command += DEFAULT_CONTAINER_ARGUMENTS[1:]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as container:
        assert container.stdout is not None
        said = ""
        for line in container.stdout:
            said += line
            if line.startswith("launcher"):
                [first] = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
                os.kill(int(first), signal.SIGTERM if line == "launcher ['train'] 1\n" else signal.SIGKILL)
    assert container.returncode == (7 if there else 1), said
    assert ("error: smpkit is not in this image" in said) is not there


def test_the_driver_becomes_the_launcher(tmp_path: Path) -> None:
    """Run for real, over the tree that SDK v3 makes: sources as loose files in the channel `code`."""
    import smpkit_estimator

    driver = Path(smpkit_estimator.__file__).with_name("sdk3_driver") / "smpkit_driver.py"
    code, config = tmp_path / "input" / "data" / "code", tmp_path / "input" / "config"
    code.mkdir(parents=True)
    config.mkdir()
    (code / "train.py").write_text("import os, sys; print(sys.argv[1:], os.environ['SM_HP_TEXT'])")
    launcher = {"torch_distributed": {"enabled": True, "processes_per_host": 1}}
    job = job_from_arguments({"entry_point": "train.py", "hyperparameters": VALUES}, launcher)
    sent = hyperparameters(job, submit_directory=str(code), job_name="", region="")
    (config / "hyperparameters.json").write_text(json.dumps(sent))
    environ = {**os.environ, "SMPKIT_BASE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(driver)], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("'--text', 'a b'] a b")


def sent_by_model_trainer(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what `ModelTrainer.train` sends, and the objects that it uploads, with an S3 of moto's."""
    from smpkit_estimator.sdk3 import Smpkit

    environ = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": REGION,
        "SAGEMAKER_VALIDATE_ROLE": "false",
    }
    with mock.patch.dict(os.environ, environ):
        import boto3
        from botocore.client import BaseClient
        from moto import mock_aws
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.train import ModelTrainer
        from sagemaker.train.configs import Compute, SourceCode

        (folder / "train.py").write_text("print()\n")
        smp: Smpkit = adapter()
        caught: list[dict[str, Any]] = []
        real = BaseClient._make_api_call

        def call(client: Any, operation: str, arguments: Any) -> Any:
            if operation == "CreateTrainingJob":
                caught.append(arguments)
            return real(client, operation, arguments)

        with mock_aws(), mock.patch.object(BaseClient, "_make_api_call", call):
            s3 = boto3.client("s3")
            s3.create_bucket(Bucket="smpkit-demo", CreateBucketConfiguration={"LocationConstraint": REGION})
            trainer = ModelTrainer(
                training_image=IMAGE,
                role=ROLE,
                source_code=SourceCode(source_dir=str(folder), entry_script="train.py"),
                compute=Compute(instance_type="ml.p4d.24xlarge", instance_count=2),
                distributed=smp,
                hyperparameters=smp.hyperparameters("train.py", VALUES),
                sagemaker_session=Session(boto_session=boto3.Session(region_name=REGION), default_bucket="smpkit-demo"),
                base_job_name="smpkit",
            )
            trainer.train(wait=False, logs=False)
            keys = [item["Key"] for item in s3.list_objects_v2(Bucket="smpkit-demo")["Contents"]]
            uploads = {key: s3.get_object(Bucket="smpkit-demo", Key=key)["Body"].read() for key in keys}
    return caught[0], uploads


FIELDS = {"smp_options": {"enabled": True, "parameters": SMP}, "mpi_options": MPI}


def missing(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: Any) -> dict[str, str]:
    """Return what the driver finds in files as SDK v3 writes them."""
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    monkeypatch.setattr(smpkit_driver, "_DRIVERS", folder)
    monkeypatch.setattr(smpkit_driver, "_HYPERPARAMETERS", folder / "hyperparameters.json")
    monkeypatch.setattr(smpkit_driver, "_FAILURE", folder / "output" / "failure")
    found = smpkit_driver._missing_hyperparameters()
    return json.loads(found.get("SMPKIT_HYPERPARAMETERS", "{}"))


def test_forgotten_hyperparameters_are_found_in_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job is accepted, and fails on machines that are paid for: "the job names no entry point"."""
    source = {"entry_script": "train.py", "source_dir": "src"}
    found = missing(tmp_path, monkeypatch, hyperparameters={"epochs": "3"}, sourcecode=source, distributed=FIELDS)
    assert json.loads(found["mp_parameters"]) == SMP
    assert found["sagemaker_program"] == '"train.py"'
    assert found["sagemaker_submit_directory"] == '"/opt/ml/input/data/code"'
    assert (found["sagemaker_mpi_enabled"], found["sagemaker_mpi_num_of_processes_per_host"]) == ("true", "8")
    assert not {"sagemaker_region", "sagemaker_job_name", "sagemaker_instance_type"} & set(found)
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    shutil.copy(tmp_path / "hyperparameters.json", config)
    environment = Environment.read(tmp_path, {}, num_gpus=0, num_cpus=1, more=found)
    assert (environment.script, environment.mp_parameters) == ("train.py", SMP)
    assert environment.hyperparameters["epochs"] == 3
    assert missing(tmp_path, monkeypatch, hyperparameters={"sagemaker_program": '"x.py"'}) == {}
    assert missing(tmp_path, monkeypatch, hyperparameters={}, sourcecode={"command": "ls", "entry_script": None}) == {}
    with pytest.raises(SystemExit, match="literal true"):
        missing(tmp_path, monkeypatch, sourcecode=source, distributed={"smp_options": {"enabled": 1}})
    assert "literal true" in (tmp_path / "output" / "failure").read_text()


@with_sdk3
def test_sdk3_writes_the_files_in_which_they_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, uploads = sent_by_model_trainer(tmp_path)
    files = {
        name: json.loads(next(text for key, text in uploads.items() if key.endswith(f"sm_drivers/{name}.json")))
        for name in ("sourcecode", "distributed")
    }
    found = missing(tmp_path, monkeypatch, hyperparameters={}, **files)
    assert found == {name: request["HyperParameters"][name] for name in found}
    assert {"sagemaker_program", "mp_parameters"} <= set(found)
