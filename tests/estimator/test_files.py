"""Files that lie in S3 or in a folder: checkpoints that are copied, and the folder of a run."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import boto3
import pytest

from smpkit.config.job import JobConfig
from smpkit.errors import CheckpointError, CloudError, JobError, UnsupportedError
from smpkit.testing import FakeSageMaker
from smpkit_estimator.backend import Access, open_backend, run_below
from smpkit_estimator.checkpoints import latest_checkpoint, plan_transfer
from smpkit_estimator.cloud import Cloud
from smpkit_estimator.files import Bucket, Folder, folder_here
from smpkit_estimator.sagemaker_backend import SageMaker, _unpack_run

STEP = {
    "step_2_partial/index.json": b"{}",
    "step_2_partial/model_0_0.pt": b"weights",
    "user_content_step_2_partial": b"x",
}


def filled(folder: Path) -> Folder:
    """A folder with an old checkpoint, the newest one, and what is not whole."""
    files = {"step_1_partial/index.json": b"old", **STEP, "newest": b"step_2_partial", "step_3_partial/a.tmp": b"half"}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return Folder(folder)


def test_the_newest_checkpoint_goes_to_s3_and_back(tmp_path: Path) -> None:
    fake = FakeSageMaker()
    there, back = Bucket(Cloud(fake), "s3://bucket/ckpt/"), Folder(tmp_path / "back")
    transfer = plan_transfer(filled(tmp_path / "here"), there)
    assert transfer is not None
    assert not fake.storage.objects
    assert str(transfer) == (
        f"checkpoint `step_2_partial` (3 files, 0.0 MiB) from {tmp_path / 'here'} to s3://bucket/ckpt"
    )
    transfer.run()
    kept = {uri.removeprefix("s3://bucket/ckpt/"): each.content for uri, each in fake.storage.objects.items()}
    assert kept == {**STEP, "newest": b"step_2_partial"}
    assert latest_checkpoint(there) == "s3://bucket/ckpt/step_2_partial"
    fake.storage.put("s3://bucket/ckpt/step_2_partial/../../evil", b"")
    fake.storage.put("s3://bucket/ckpt//etc/evil", b"")
    returned = plan_transfer(there, back)
    assert returned is not None
    returned.run()
    assert {name: (back.path / name).read_bytes() for name in back.list()} == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "here"]


def test_what_is_there_already_is_compared(tmp_path: Path) -> None:
    """A copy that broke off goes on; another checkpoint of the same name is left alone."""
    here, there = filled(tmp_path / "here"), Folder(tmp_path / "there")
    there.write("step_2_partial/index.json", io.BytesIO(b"{}"))
    transfer = plan_transfer(here, there)
    assert transfer is not None
    assert transfer.files == ("step_2_partial/model_0_0.pt", "user_content_step_2_partial")
    there.write("step_2_partial/model_0_0.pt", io.BytesIO(b"weighty"))
    with pytest.raises(CheckpointError, match="there is another checkpoint `step_2_partial` at"):
        plan_transfer(here, there)
    assert plan_transfer(Folder(tmp_path / "none"), there) is None


def test_places_that_cannot_be_reached_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="/nowhere is in a volume of the cluster, which this machine does not"):
        folder_here("/nowhere", "a volume of the cluster")
    with pytest.raises(UnsupportedError, match="s3://b/c is no folder that Slurm's nodes see"):
        open_backend("slurm", Access()).files("s3://b/c")
    with pytest.raises(UnsupportedError, match="/ckpt is no place in S3"):
        SageMaker(FakeSageMaker()).files("/ckpt")
    with pytest.raises(CloudError, match=r"cannot read .*none: no such file"):
        Folder(tmp_path).read("none", io.BytesIO())


def test_large_objects_go_in_parts(aws: None, tmp_path: Path) -> None:
    """17 MiB in three parts, through boto3 and S3 in memory."""
    boto3.client("s3", "us-east-1").create_bucket(Bucket="large")
    files = Bucket(Cloud(boto3.Session(region_name="us-east-1")), "s3://large")
    content = os.urandom(17 << 20)
    files.write("a/b", io.BytesIO(content))
    found = io.BytesIO()
    files.read("a/b", found)
    assert found.getvalue() == content
    assert files.list()["a/b"].size == len(content)
    with pytest.raises(CloudError, match="cannot read s3://large/none"):
        files.read("none", io.BytesIO())


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> object:
    from moto import mock_aws

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with mock_aws():
        yield


def archive(*files: tuple[str, bytes], link: str | None = None) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo("run/link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    return packed.getvalue()


def test_the_folder_of_a_run_comes_out_of_sagemakers_archive(tmp_path: Path) -> None:
    fake = FakeSageMaker()
    backend = SageMaker(fake)
    (tmp_path / "train.py").touch()
    job = JobConfig.model_validate(
        {
            "entry_point": "train.py",
            "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest",
            "role": "arn:aws:iam::123456789012:role/SM",
            "output": "s3://bucket/out",
            "compute": {"instance_type": "ml.p4d.24xlarge"},
        }
    )
    backend.submit(backend.plan(job, tmp_path, name="job"))
    with pytest.raises(JobError, match="job `job` has left no results yet"):
        backend.results("job", tmp_path / "copy")
    place = "s3://bucket/out/job/output/output.tar.gz"
    fake.storage.put(place, archive(("run/values.jsonl", b"{}"), ("big.bin", b"1"), ("run/../evil", b""), link="/etc"))
    found = backend.results("job", tmp_path / "copy")
    assert found == tmp_path / "copy" / "run"
    assert [path.relative_to(found) for path in found.rglob("*")] == [Path("values.jsonl")]
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["run"]
    fake.storage.put(place, archive(("big.bin", b"1")))
    with pytest.raises(JobError, match="job `job` has left no measurements"):
        backend.results("job", tmp_path / "other")
    with pytest.raises(CloudError, match="cannot unpack there"):
        _unpack_run(io.BytesIO(b"no archive"), tmp_path / "bad", "there")


def test_the_folder_of_a_run_is_below_the_results(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has left no measurements: there is no folder"):
        run_below(tmp_path, "job")
    (tmp_path / "run").mkdir()
    assert run_below(tmp_path, "job") == tmp_path / "run"
