"""A job on SageMaker whose hosts are launchers of this machine, from `smpkit submit` to its report and its resume.

The account is `tests.aws`'s. What the platform does around the launcher is copied here: it writes the files below
`/opt/ml`, brings checkpoints from S3 and takes them back, stops by SIGTERM, and tells the reason of the first failure.
What only AWS can show is not played: roles, networks, capacity, images, Spot.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import smpkit_container.__main__ as launcher
from smpkit.cli.options import BackendChoice
from tests.aws import Aws, Job, Script, aws
from tests.clock import FakeClock
from tests.container.test_peers import free_ports
from tests.job_contract import (
    PIPELINE,
    SCRIPT,
    Client,
    OnCluster,
    a_job_that_fails,
    a_job_that_is_stopped_goes_on,
    a_job_that_succeeds,
    a_long_log_is_followed_whole,
    a_report_of_it,
    in_this_process,
    uninterrupted,
)
from tests.leftovers import processes_with

__all__ = ["aws"]

pytestmark = pytest.mark.slow

HOSTS = ("localhost", "127.0.0.2")
"""In place of `algo-1` and `algo-2`, which nothing resolves here."""

_fork = multiprocessing.get_context("fork").Process


class RealTime(FakeClock):
    """The machine's clock, on which nobody sleeps long."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def advance(self, seconds: float) -> None:
        signal.sigtimedwait([], min(seconds, 0.2))


class RealJob(Job):
    """A job that is two launchers; each is a fork of this process, and so has a copy of the account's S3."""

    def __init__(self, account: Aws, folder: Path, request: dict[str, Any], script: Script, now: datetime) -> None:
        super().__init__(request, script, now)
        self.account, self.phases = account, [(now, "Starting"), (now, "Training")]
        self.bases = [folder / self.name / host for host in HOSTS[: request["ResourceConfig"]["InstanceCount"]]]
        self.read, self.events = [0 for _ in self.bases], list[tuple[str, dict[str, Any]]]()
        for base in self.bases:
            self._lay_out(base)
        self.hosts = [_fork(target=self._be_the_host, args=(base,)) for base in self.bases]
        for host in self.hosts:
            host.start()

    def _lay_out(self, base: Path) -> None:
        config, hosts = base / "input" / "config", [each.name for each in self.bases]
        config.mkdir(parents=True)
        checkpoints = self.request["CheckpointConfig"]
        written = {
            "hyperparameters": self.request["HyperParameters"],
            "resourceconfig": {"current_host": base.name, "hosts": hosts, "network_interface_name": "lo"},
            "checkpointconfig": {**checkpoints, "LocalPath": str(base / "checkpoints")},
        }
        for name, content in written.items():
            (config / f"{name}.json").write_text(json.dumps(content))
        for uri, content in self.account.objects().items():
            if uri.startswith(f"{checkpoints['S3Uri']}/"):
                place = base / "checkpoints" / uri.removeprefix(f"{checkpoints['S3Uri']}/")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)

    def _be_the_host(self, base: Path) -> None:
        for descriptor in (1, 2):
            os.dup2(os.open(base / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        setattr(launcher, "DEFAULT_BASE", base)  # noqa: B010  only there sources are fetched; it is another module's
        environ = {**os.environ, **self.request.get("Environment", {}), "SMPKIT_BASE_DIR": str(base)}
        os._exit(launcher.main(["train"], {**environ, "TRAINING_JOB_NAME": self.name}))

    def stop(self, now: datetime) -> None:
        self.phases.append((now, "Stopping"))
        for host in self.hosts:
            host.terminate()

    def describe(self, now: datetime) -> dict[str, Any]:
        if self.phases[-1][1] in ("Training", "Stopping") and not any(host.is_alive() for host in self.hosts):
            self._end(now)
        return super().describe(now)

    def _end(self, now: datetime) -> None:
        to = self.request["OutputDataConfig"]["S3OutputPath"]
        for archive, part in (("model", "model"), ("output", "output/data")):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w:gz") as tar:
                for base in self.bases:
                    for path in sorted((base / part).rglob("*")):
                        tar.add(path, path.relative_to(base / part), recursive=False)
            self.account.put(f"{to}/{self.name}/output/{archive}.tar.gz", packed.getvalue())
        for base in self.bases:
            for path in (base / "checkpoints").rglob("*"):
                if path.is_file():
                    place = path.relative_to(base / "checkpoints")
                    self.account.put(f"{self.request['CheckpointConfig']['S3Uri']}/{place}", path.read_bytes())
        failed = next(((host, base) for host, base in zip(self.hosts, self.bases, strict=True) if host.exitcode), None)
        end = "Stopped" if self.phases[-1][1] == "Stopping" else "Completed"
        if failed is not None and end == "Completed":
            reason = (failed[1] / "output" / "failure").read_text()[:1024]
            self.script, end = Script(failure=f"AlgorithmError: {reason}, exit code: {failed[0].exitcode}"), "Failed"
        self.phases.append((now, end))

    def log(self, now: datetime) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, base in enumerate(self.bases):
            with (base / "log").open("rb") as log:
                log.seek(self.read[number])
                while (line := log.readline()).endswith(b"\n"):
                    self.read[number] = log.tell()
                    event = {"timestamp": round(now.timestamp() * 1000), "message": line.decode().rstrip()}
                    self.events.append((f"{self.name}/algo-{number + 1}-{self.created.timestamp():.0f}", event))
        yield from self.events


@dataclass
class User(Client):
    """Somebody with a job file in the current folder."""

    account: Aws
    port: int

    def run(self, *arguments: str, code: int = 0) -> Any:
        return in_this_process(*arguments, code=code)

    def write(self, script: str | None = None, **job: Any) -> None:
        distribution = json.loads(json.dumps(job.pop("distribution", PIPELINE)))
        distribution["smdistributed"]["modelparallel"]["parameters"]["ddp_port"] = self.port
        Path("train.py").write_text(SCRIPT.read_text() if script is None else script)
        whole = {
            "entry_point": "train.py",
            "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest",
            "role": "arn:aws:iam::123456789012:role/SM",
            "output": "s3://bucket/out",
            "checkpoints": "s3://bucket/checkpoints",
            "compute": {"instance_type": "ml.c5.xlarge", "instance_count": 2},
            "distribution": distribution,
            **job,
        }
        Path("job.yaml").write_text(yaml.safe_dump(whole))

    def until_logged(self, name: str, text: str) -> None:
        self.until(lambda: text in self.log_of(name), f"`{text}` in the log of {name}")

    def log_of(self, name: str) -> str:
        return "\n".join(event["message"] for _, event in self.account.jobs[name].log(self.account.clock.now()))

    def told(self) -> str:
        return "\n".join(f"--- {name}\n{self.log_of(name)[-3000:]}" for name in self.account.jobs)


@pytest.fixture
def user(aws: Aws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """A user of the account, of whose jobs nothing is left afterwards."""
    hosts, work = tmp_path / "hosts", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SMPKIT_SETTLE_SECONDS", "0.5")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    aws.clock, aws.start = RealTime(), partial(RealJob, aws, hosts)
    backend = aws.open()
    monkeypatch.setattr(BackendChoice, "open", lambda *_: backend)
    with free_ports() as port:
        pass
    yield User(aws, port)
    for job in aws.jobs.values():
        assert isinstance(job, RealJob)
        for host in job.hosts:
            host.kill()
            host.join(10)
    assert not processes_with(f"SMPKIT_BASE_DIR={hosts}")


def in_archive(account: Aws, name: str, file: str) -> str:
    packed = account.objects()[f"s3://bucket/out/{name}/output/model.tar.gz"]
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        content = tar.extractfile(file)
        assert content is not None
        return content.read().decode()


def test_a_job_succeeds_and_has_a_report(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write(hyperparameters={"steps": 6})
    a_job_that_succeeds(user.run, "good", ("algo-1", "algo-2"))
    assert in_archive(user.account, "good", "losses.txt") == uninterrupted()
    monkeypatch.setenv("SMPKIT_BACKEND", "sagemaker")
    a_report_of_it(user.run, "good")


def test_the_rank_that_fails_is_named(user: User) -> None:
    user.write(hyperparameters={"steps": 6, "fail-on-rank": 1})
    a_job_that_fails(user.run, "bad", "ValueError: bad batch", HOSTS[1])


def test_a_job_that_is_stopped_goes_on_from_s3(user: User) -> None:
    a_job_that_is_stopped_goes_on(OnCluster(user, lambda name: in_archive(user.account, name, "losses.txt")))


def test_a_long_log_comes_whole(user: User) -> None:
    lines = 50_000
    user.write(f"import os\nfor n in range({lines}):\n    print('line', os.environ['RANK'], n)\n")
    a_long_log_is_followed_whole(user.run, "algo-2", lines)
