"""Back ends are found by name: smpkit's own, and those of other packages by their entry points."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from smpkit.config.backend import BACKENDS
from smpkit.errors import UsageError
from smpkit_estimator.backend import OWN, Access, known_backends, open_backend
from tests.aws import Aws
from tests.cli.conftest import Smpkit, smpkit
from tests.cli.test_managed_jobs import JOB

__all__ = ["smpkit"]


PACKAGE = """
import boto3

from smpkit_estimator.sagemaker import SageMaker

clock, sessions = None, {}

def open_elsewhere(access):
    region = access.region or "eu-west-1"
    if region not in sessions:
        sessions[region] = boto3.Session("testing", "testing", region_name=region)
    return SageMaker(sessions[region], clock)
"""


@pytest.fixture
def elsewhere(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package as pip leaves it, a module and the folder of its metadata; and go into a folder with a job."""
    packages = tmp_path / "site-packages"
    metadata = packages / "somebodys-1.0.dist-info"
    metadata.mkdir(parents=True)
    (packages / "somebodys_backend.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{BACKENDS}]\nelsewhere = somebodys_backend:open_elsewhere\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "somebodys_backend", raising=False)
    monkeypatch.setattr(importlib.import_module("somebodys_backend"), "clock", aws.clock)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text(JOB)


@pytest.mark.usefixtures("elsewhere")
def test_a_package_adds_one_with_an_entry_point() -> None:
    assert known_backends() == [*OWN, "elsewhere"]
    assert open_backend("elsewhere", Access(region="mars-1")).title == "SageMaker in mars-1"


@pytest.mark.usefixtures("elsewhere")
def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="`elsewere` is no back end") as caught:
        open_backend("elsewere")
    assert caught.value.hint == "did you mean `elsewhere`?"
    with pytest.raises(UsageError) as caught:
        open_backend("xyz")
    assert caught.value.hint == f"those are {', '.join(OWN)}, elsewhere"


@pytest.mark.usefixtures("elsewhere")
def test_a_job_file_chooses_one_and_later_commands_are_told(smpkit: Smpkit) -> None:
    Path("job.yaml").write_text(f"{JOB}backend: elsewhere\n")
    done = smpkit("submit", "job.yaml", "--name", "job")
    assert done.exit_code == 0, done.stderr
    assert "to SageMaker in eu-west-1" in done.stderr
    assert "stop with `smpkit stop job --backend elsewhere`" in done.stderr


@pytest.mark.usefixtures("elsewhere")
def test_every_command_knows_it(smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMPKIT_BACKEND", "elsewhere")
    assert "TrainingJobName: job" in smpkit("submit", "job.yaml", "--name", "job", "--dry-run").stdout
    for words, code in (
        ("submit job.yaml --name job", 0),
        ("status job", 0),
        ("logs job", 0),
        ("stop job --wait", 0),
        ("status job --watch", 1),
        ("resume job --name next", 0),
        ("report job", 1),
        ("status none", 2),
    ):
        done = smpkit(*words.split())
        assert done.exit_code == code, f"{words}: {done.exit_code}\n{done.output}"
    found = json.loads(smpkit("jobs", "--json").stdout)
    assert {each["name"] for each in found} == {"job", "next"}
