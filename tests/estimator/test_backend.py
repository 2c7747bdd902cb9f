"""Back ends are found by name: smpkit's own, and those of other packages by their entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from smpkit.errors import UsageError
from smpkit.testing import FakeSageMaker
from smpkit_estimator import backend
from smpkit_estimator.backend import OWN, Access, Backend, known_backends, open_backend
from smpkit_estimator.sagemaker_backend import SageMaker
from tests.cli.conftest import Smpkit, smpkit

__all__ = ["smpkit"]


def open_elsewhere(access: Access) -> Backend:
    return SageMaker(FakeSageMaker(region=access.region or "eu-west-1"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("elsewhere", f"{__name__}:open_elsewhere", backend.GROUP)
    monkeypatch.setattr(backend, "entry_points", lambda group: [found] if group == backend.GROUP else [])


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
