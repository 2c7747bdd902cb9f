"""Back ends are found by name: smpkit's own, and those of other packages by their entry points."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from smpkit.errors import UsageError
from smpkit_estimator.backend import GROUP, OWN, Access, known_backends, open_backend
from tests.cli.conftest import Smpkit, smpkit

__all__ = ["smpkit"]


PACKAGE = """
from smpkit.testing import FakeSageMaker
from smpkit_estimator.sagemaker_backend import SageMaker

accounts = {}

def open_elsewhere(access):
    region = access.region or "eu-west-1"
    return SageMaker(accounts.setdefault(region, FakeSageMaker(region=region)))
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package as pip leaves it: a module, and the folder of its metadata."""
    packages = tmp_path / "site-packages"
    metadata = packages / "somebodys-1.0.dist-info"
    metadata.mkdir(parents=True)
    (packages / "somebodys_backend.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nelsewhere = somebodys_backend:open_elsewhere\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "somebodys_backend", raising=False)


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
def test_a_job_file_chooses_one_and_later_commands_are_told(
    smpkit: Smpkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("job.yaml").write_text(
        "entry_point: train.py\nbackend: elsewhere\nrole: arn:aws:iam::123456789012:role/SM\n"
        "image: 123456789012.dkr.ecr.eu-west-1.amazonaws.com/smpkit:1\ncompute: {instance_type: ml.p4d.24xlarge}\n"
    )
    done = smpkit("submit", "job.yaml", "--name", "job")
    assert done.exit_code == 0, done.stderr
    assert "to SageMaker in eu-west-1" in done.stderr
    assert "stop with `smpkit stop job --backend elsewhere`" in done.stderr
    assert "`smpkit stop job --backend fake`" in smpkit("submit", "job.yaml", "--backend", "fake", "--name", "job",
        env={"SMPKIT_FAKE_DIR": str(tmp_path / "fake")}).stderr  # fmt: skip


@pytest.mark.usefixtures("elsewhere")
def test_every_command_knows_it(smpkit: Smpkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMPKIT_BACKEND", "elsewhere")
    Path("train.py").touch()
    Path("job.yaml").write_text(
        "entry_point: train.py\nrole: arn:aws:iam::123456789012:role/SM\ncheckpoints: s3://bucket/checkpoints\n"
        "image: 123456789012.dkr.ecr.eu-west-1.amazonaws.com/smpkit:1\ncompute: {instance_type: ml.p4d.24xlarge}\n"
    )
    assert "TrainingJobName: job" in smpkit("submit", "job.yaml", "--name", "job", "--dry-run").stdout
    for words, code in (
        ("submit job.yaml --name job", 0),
        ("status job", 0),
        ("logs job", 0),
        ("stop job --wait", 0),
        ("wait job", 1),
        ("resume job --name next", 0),
        ("cost job", 0),
        ("report job", 1),
        ("status none", 2),
    ):
        done = smpkit(*words.split())
        assert done.exit_code == code, f"{words}: {done.exit_code}\n{done.output}"
    found = json.loads(smpkit("jobs", "--backend", "all", "--json").stdout)
    assert {(each["backend"], each["name"]) for each in found} >= {("elsewhere", "job"), ("elsewhere", "next")}
