"""An AWS account in memory: S3, STS, IAM, ECR and CloudWatch are moto's, SageMaker's training jobs are played here.

botocore's clients are real, with their retries; what they send over HTTP is answered by `Aws`. A job goes through its
phases as `Script` says, on a clock that stands still until somebody sleeps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from moto import mock_aws
from moto.core.botocore_stubber import BotocoreStubber, MockRawResponse
from moto.logs.models import logs_backends

from smpkit_estimator.sagemaker import LOG_GROUP, SageMaker
from tests.clock import FakeClock

ACCOUNT, REGION = "123456789012", "us-west-2"
SESSION = boto3.Session("testing", "testing", region_name=REGION)  # one for all tests: it reads its models for a second
FINAL = ("Completed", "Failed", "Stopped")


class Line(NamedTuple):
    at: float  # seconds after training has begun
    text: str
    host: int = 0


@dataclass(frozen=True)
class Script:
    """What a job does; times in seconds."""

    training: float = 60
    lines: tuple[Line, ...] = ()
    failure: str | None = None
    interruptions: tuple[float, ...] = ()  # how long attempts train that are taken away
    log_delay: float = 2


class Job:
    def __init__(self, request: dict[str, Any], script: Script, now: datetime) -> None:
        self.name, self.request, self.script, self.created = request["TrainingJobName"], request, script, now
        self.arn, self.num_written = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{self.name}", 0
        self.more: dict[str, Any] = {}  # of its description
        self.phases: list[tuple[datetime, str]] = []
        attempts = [*((seconds, "Interrupted", 120) for seconds in script.interruptions)]
        for trained, after, seconds_after in (*attempts, (script.training, "Uploading", 10)):
            lengths = {"Starting": 60, "Downloading": 20, "Training": trained, after: seconds_after}
            for phase, seconds in lengths.items():
                self.phases.append((now, phase))
                now += timedelta(seconds=seconds)
        self.phases.append((now, "Failed" if script.failure else "Completed"))

    def stop(self, now: datetime) -> None:
        end = [(now, "Stopping"), (now + timedelta(seconds=30), "Stopped")]
        self.phases = [part for part in self.phases if part[0] <= now] + end

    def describe(self, now: datetime) -> dict[str, Any]:
        past = [part for part in self.phases if part[0] <= now]
        parts = [(start, end, phase) for (start, phase), (end, _) in pairwise([*past, (now, "")])]
        phase, over, output = past[-1][1], past[-1][1] in FINAL, self.request["OutputDataConfig"]["S3OutputPath"]
        facts = {name: value for name, value in self.request.items() if name != "Tags"} | self.more
        facts |= {"TrainingJobArn": self.arn, "CreationTime": self.created, "SecondaryStatus": phase}
        facts["TrainingJobStatus"] = phase if over or phase == "Stopping" else "InProgress"
        facts["ModelArtifacts"] = {"S3ModelArtifacts": f"{output}/{self.name}/output/model.tar.gz"}
        facts["SecondaryStatusTransitions"] = [
            {"Status": name, "StatusMessage": "so it is", "StartTime": start} | ({} if end == now else {"EndTime": end})
            for start, end, name in parts
        ]
        facts |= dict([("TrainingStartTime", start) for start, _, name in parts if name == "Training"][:1])
        if over:
            worked = [end - start for start, end, name in parts[:-1] if name not in ("Starting", "Interrupted")]
            facts |= {"TrainingEndTime": past[-1][0], "BillableTimeInSeconds": round(sum(worked, timedelta()).seconds)}
        return facts | ({"FailureReason": self.script.failure} if phase == "Failed" else {})

    def log(self, now: datetime) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the stream and the event of each line that can be read by now; each attempt writes all anew."""
        for (start, phase), (end, _) in pairwise(self.phases):
            for line in self.script.lines if phase == "Training" else ():
                time = start + timedelta(seconds=line.at)
                if time <= end and time + timedelta(seconds=self.script.log_delay) <= now:
                    stream = f"{self.name}/algo-{line.host + 1}-{start.timestamp():.0f}"
                    yield stream, {"timestamp": round(time.timestamp() * 1000), "message": line.text}


class Aws:
    """The account; `script` is what jobs do that start from now on."""

    def __init__(self) -> None:
        self.script, self.clock, self.page_events = Script(), FakeClock(), 10_000
        self.start: Callable[[dict[str, Any], Script, datetime], Job] = Job
        self.jobs: dict[str, Job] = {}
        self.calls: Counter[str] = Counter()
        self.faults: list[SimpleNamespace] = []

    def open(self) -> SageMaker:
        return SageMaker(SESSION, self.clock)

    def fail(self, operation: str, error: BaseException | str, message: str = "", **options: Any) -> None:
        """Let calls fail, `late` after they were done; with an exception, or with a code of the service."""
        options = {"status": 400, "times": 1, "after": 0, "late": False, **options}
        self.faults.append(SimpleNamespace(operation=operation, error=error, message=message, **options))

    def put(self, uri: str, content: bytes = b"") -> None:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        SESSION.client("s3").put_object(Bucket=bucket, Key=key, Body=content)

    def objects(self) -> dict[str, bytes]:
        objects = SESSION.resource("s3").Bucket("bucket").objects.all()
        return {f"s3://bucket/{each.key}": each.get()["Body"].read() for each in objects}

    def answer(self, operation: str, request: Any, moto: Callable[[], Any]) -> Any:
        self.calls[operation] += 1
        fault = next((each for each in self.faults if each.operation == operation and each.times), None)
        if fault is not None and fault.after:
            fault.after -= 1
            fault = None
        found = self._answer(operation, request, moto) if fault is None or fault.late else None
        if fault is None:
            return found
        fault.times -= 1
        if isinstance(fault.error, BaseException):
            raise fault.error
        return reply(request, {"__type": fault.error, "message": fault.message}, fault.status)

    def _answer(self, operation: str, request: Any, moto: Callable[[], Any]) -> Any:
        if operation in ("GetLogEvents", "DescribeLogStreams"):
            self._write_logs()
            limit = {"limit": self.page_events} if operation == "GetLogEvents" else {}
            request.body = json.dumps({**json.loads(request.body), **limit}).encode()
        if not request.headers.get("X-Amz-Target", b"").startswith(b"SageMaker"):
            return moto()
        body, now = json.loads(request.body), self.clock.now()
        job = self.jobs.get(body.get("TrainingJobName"))
        if operation == "CreateTrainingJob" and job is not None:
            return reply(request, {"__type": "ResourceInUse", "message": "this name already exists"}, 400)
        if operation == "CreateTrainingJob":
            job = self.jobs[body["TrainingJobName"]] = self.start(body, self.script, now)
        if operation == "ListTags":
            job = next(job for job in self.jobs.values() if job.arn == body["ResourceArn"])
            return reply(request, {"Tags": job.request.get("Tags", [])})
        if operation == "ListTrainingJobs":
            return reply(request, {"TrainingJobSummaries": list(self._listed(body))})
        if job is None or (operation == "StopTrainingJob" and job.describe(now)["TrainingJobStatus"] in FINAL):
            return reply(request, {"__type": "ValidationException", "message": "Requested resource not found."}, 400)
        if operation == "StopTrainingJob":
            job.stop(now)
        return reply(request, job.describe(now))

    def _listed(self, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for job in reversed(self.jobs.values()):
            facts = job.describe(self.clock.now())
            right_status = query.get("StatusEquals") in (None, facts["TrainingJobStatus"])
            new = job.created.timestamp() >= query.get("CreationTimeAfter", 0)
            if right_status and new and query.get("NameContains", "") in job.name:
                yield {name: facts[name] for name in facts if name.startswith(("TrainingJob", "Creation", "Secondary"))}

    def _write_logs(self) -> None:
        logs = logs_backends[ACCOUNT][REGION]
        for job in self.jobs.values():
            events = list(job.log(self.clock.now()))
            for stream, event in events[job.num_written :]:
                if LOG_GROUP not in logs.groups:
                    logs.create_log_group(LOG_GROUP, {})
                if stream not in logs.groups[LOG_GROUP].streams:
                    logs.create_log_stream(LOG_GROUP, stream)
                logs.groups[LOG_GROUP].streams[stream].put_log_events([event])
            job.num_written = len(events)


def reply(request: Any, body: dict[str, Any], status: int = 200) -> AWSResponse:
    text = json.dumps(body, default=datetime.timestamp)
    if "X-Amz-Target" not in request.headers:  # S3, STS and IAM speak XML
        error = f"<Code>{body['__type']}</Code><Message>{body['message']}</Message>"
        text = f"<ErrorResponse><Error>{error}</Error></ErrorResponse>"
    return AWSResponse(request.url, status, {"x-amzn-RequestId": "1"}, MockRawResponse(text))


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """An account with a bucket."""
    aws, moto = Aws(), BotocoreStubber.__call__

    def stub(stubber: BotocoreStubber, event_name: str, request: Any, **options: Any) -> Any:
        return aws.answer(event_name.rpartition(".")[2], request, lambda: moto(stubber, event_name, request, **options))

    monkeypatch.setattr(BotocoreStubber, "__call__", stub)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=aws.clock.sleep))
    with mock_aws():
        SESSION.client("s3").create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": REGION})
        aws.calls.clear()
        yield aws
