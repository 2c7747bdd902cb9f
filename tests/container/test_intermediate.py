from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smpkit.errors import ConfigError, LaunchError
from smpkit_container.environment import Environment, Folders
from smpkit_container.intermediate import S3_OUTPUT, LiveUpload, live_upload

LONG = 60.0


class Bucket:
    """What was uploaded, and how many uploads fail first."""

    def __init__(self, failures: float = 0) -> None:
        self.failures = failures
        self.objects: dict[str, str] = {}
        self.said: list[str] = []

    def send(self, path: Path, uri: str) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise LaunchError(f"{path.name} cannot be uploaded", hint="ask")
        self.objects[uri] = path.read_text()

    def watch(self, folder: Path) -> LiveUpload:
        return LiveUpload(folder, "s3://bucket/job", self.send, self.said.append, look_seconds=0.01)


def wait_for(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_files_arrive_while_the_job_runs_and_again_when_they_change(tmp_path: Path) -> None:
    bucket = Bucket()
    uploads = bucket.watch(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("one")
    wait_for(lambda: bucket.objects == {"s3://bucket/job/deep/a.txt": "one"})
    (tmp_path / "deep" / "a.txt").write_text("three")
    wait_for(lambda: bucket.objects == {"s3://bucket/job/deep/a.txt": "three"})
    (tmp_path / "b.txt").write_text("last")
    uploads.close(LONG)
    assert bucket.objects["s3://bucket/job/b.txt"] == "last"
    assert bucket.said == []


def test_an_upload_that_fails_is_told_once_and_tried_again_at_the_end(tmp_path: Path) -> None:
    bucket = Bucket(failures=2)
    uploads = bucket.watch(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    wait_for(lambda: bucket.failures == 0)
    uploads.close(LONG)
    assert sorted(bucket.objects) == ["s3://bucket/job/a", "s3://bucket/job/b"]
    assert [line.split(" ", 2)[2] for line in bucket.said] == ["cannot be uploaded\nhint: ask"]


def test_what_never_arrives_is_named(tmp_path: Path) -> None:
    bucket = Bucket(failures=float("inf"))
    uploads = bucket.watch(tmp_path)
    (tmp_path / "a").write_text("a")
    uploads.close(LONG)
    assert bucket.said[-1] == "warning: files were not uploaded (1) to s3://bucket/job, such as a"


def test_the_job_does_not_wait_for_an_upload_that_hangs(tmp_path: Path) -> None:
    said: list[str] = []
    released, begun = threading.Event(), threading.Event()

    def hang(_path: Path, _uri: str) -> None:
        begun.set()
        released.wait(LONG)

    uploads = LiveUpload(tmp_path, "s3://bucket/job", hang, said.append, look_seconds=0.01)
    (tmp_path / "a").write_text("a")
    assert begun.wait(LONG)
    uploads.close(0.1)
    released.set()
    assert said == [f"warning: {tmp_path} was not uploaded completely within 0.1 s to s3://bucket/job"]


@pytest.mark.parametrize("place", [None, "", "file:///tmp/out"])
def test_nothing_is_uploaded_unasked(tmp_path: Path, place: str | None) -> None:
    assert live_upload(Environment(Folders(tmp_path), framework={S3_OUTPUT: place}), print) is None
    assert not (tmp_path / "output").exists()


def test_a_folder_that_is_there_is_the_platforms(tmp_path: Path) -> None:
    job = Environment(Folders(tmp_path), framework={S3_OUTPUT: "s3://bucket/out"})
    job.folders.intermediate.mkdir(parents=True)
    assert live_upload(job, print) is None


def test_a_place_that_is_not_in_s3_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sagemaker_s3_output: must be an S3 URI, got '/tmp'"):
        live_upload(Environment(Folders(tmp_path), framework={S3_OUTPUT: "/tmp"}), print)
