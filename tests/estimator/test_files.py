"""Files that lie in S3 or in a folder: checkpoints, and the folder of a run."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, JobError, UnsupportedError
from smpkit_estimator.checkpoints import newest_in_folder
from smpkit_estimator.sagemaker import _unpack_run
from tests.aws import Aws
from tests.container.test_source import archive, member


def test_a_folder_and_a_bucket_are_read_alike(aws: Aws, tmp_path: Path) -> None:
    for name in ("step_1_partial/index.json", "step_2_partial/index.json", "newest"):
        aws.put(f"s3://bucket/ckpt/{name}", b"step_1_partial")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"step_1_partial")
    assert aws.open().latest_checkpoint("s3://bucket/ckpt/") == "s3://bucket/ckpt/step_1_partial"
    assert newest_in_folder(f"{tmp_path}/", "a volume") == f"{tmp_path}/step_1_partial"
    with pytest.raises(UnsupportedError, match="/nowhere is in a volume of the cluster, which this machine does not"):
        newest_in_folder("/nowhere", "a volume of the cluster")


def test_the_folder_of_a_run_comes_out_of_sagemakers_archive(aws: Aws, tmp_path: Path) -> None:
    backend = aws.open()
    (tmp_path / "train.py").touch()
    written = {
        "entry_point": "train.py",
        "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest",
        "role": "arn:aws:iam::123456789012:role/SM",
        "compute": {"instance_type": "ml.p4d.24xlarge"},
        "output": "s3://bucket/out",
    }
    job = JobConfig.model_validate(written)
    backend.submit(backend.plan(job, tmp_path, name="job"))
    with pytest.raises(JobError, match="job `job` has left no results yet"):
        backend.results("job", tmp_path / "copy")
    place = "s3://bucket/out/job/output/output.tar.gz"
    link = member("run/link", tarfile.SYMTYPE, "/etc")
    whole = archive(tmp_path / "whole", member("run/values.jsonl"), member("big.bin"), member("run/../evil"), link)
    aws.put(place, whole.read_bytes())
    found = backend.results("job", tmp_path / "copy")
    assert found == tmp_path / "copy" / "run"
    assert [path.relative_to(found) for path in found.rglob("*")] == [Path("values.jsonl")]
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["run"]
    aws.put(place, archive(tmp_path / "other", member("big.bin")).read_bytes())
    with pytest.raises(JobError, match="job `job` has left no measurements: there is no folder"):
        backend.results("job", tmp_path / "none")
    with pytest.raises(CloudError, match="cannot unpack there"):
        _unpack_run(io.BytesIO(b"no archive"), tmp_path / "bad", "there")
