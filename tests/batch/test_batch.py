"""Jobs on AWS Batch: against moto, with every request checked by the service's own model as botocore ships it."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
import yaml
from botocore.stub import ANY, Stubber
from botocore.validate import ParamValidator
from moto import mock_aws

from smpkit.errors import CloudError
from smpkit_container.__main__ import described_hosts, lay_out, leave_message, main
from smpkit_estimator.aws import Cloud, request_shape
from smpkit_estimator.backend import Query
from smpkit_estimator.batch import AwsBatch, _Hosts, status_of
from tests.container.test_peers import free_ports
from tests.job_contract import PIPELINE, SCRIPT, a_job_that_fails, a_job_that_succeeds, a_report_of_it, uninterrupted
from tests.job_contract import in_this_process as run

REGION = "eu-west-1"
QUEUE = "gpus"
ROLE = "arn:aws:iam::123456789012:role/job"
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An account with a bucket and a queue, in which jobs succeed at once."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("SMPKIT_BACKEND", "batch")
    monkeypatch.chdir(tmp_path)
    with mock_aws(config={"batch": {"use_docker": False}}):
        place = {"LocationConstraint": REGION}
        boto3.client("s3", REGION).create_bucket(Bucket="bucket", CreateBucketConfiguration=place)
        boto3.client("iam", REGION).create_role(RoleName="service", AssumeRolePolicyDocument="{}")
        batch = boto3.client("batch", REGION)
        service = "arn:aws:iam::123456789012:role/service"
        made = batch.create_compute_environment(computeEnvironmentName="all", type="UNMANAGED", serviceRole=service)
        order = [{"order": 1, "computeEnvironment": made["computeEnvironmentArn"]}]
        batch.create_job_queue(jobQueueName=QUEUE, state="ENABLED", priority=1, computeEnvironmentOrder=order)
        yield


def write(script: str = "print('hello')", **job: Any) -> None:
    Path("train.py").write_text(script)
    options = {"queue": QUEUE, "staging": "s3://bucket/smpkit", "role": ROLE, **job.pop("batch", {})}
    whole = {
        "entry_point": "train.py",
        "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/smpkit:1",
        "compute": {"instance_count": 2},
        "backend": {"batch": options},
        "distribution": {"torch_distributed": {"enabled": True, "processes_per_host": 1}},
        **job,
    }
    Path("job.yaml").write_text(yaml.safe_dump({k: v for k, v in whole.items() if v is not None}))


def sent_nodes(name: str) -> dict[str, Any]:
    """What Batch got: the properties of a job's nodes, with the parameters of its definition."""
    batch = boto3.client("batch", REGION)
    [job] = batch.list_jobs(jobQueue=QUEUE, filters=[{"name": "JOB_NAME", "values": [name]}])["jobSummaryList"]
    [described] = batch.describe_jobs(jobs=[job["jobId"]])["jobs"]
    return {**described["nodeProperties"], "place": described["parameters"]["smpkit_place"]}


EVERYTHING: dict[str, Any] = {
    "gpus": 8,
    "cpus": 96,
    "memory_mib": 1_000_000,
    "shared_memory_mib": 64_000,
    "instance_type": "p4d.24xlarge",
    "volumes": [
        {"mount": "/efs", "efs": "fs-0123456789abcdef0"},
        {"mount": "/fsx", "host_path": "/fsx", "read_only": True},
    ],
    "efa": 4,
    "privileged": True,
    "retries": 3,
    "priority": 5,
    "share": "team",
    "log_group": "/team/jobs",
    "port": 9000,
}


@pytest.mark.usefixtures("aws")
def test_requests_with_every_option_fit_the_services_model() -> None:
    write(
        batch=EVERYTHING,
        output="/efs/out",
        checkpoints="/efs/checkpoints",
        inputs={"train": "/fsx/c4"},
        compute={"instance_count": 4, "max_run_seconds": 3600},
        tags={"cost": "a1"},
        environment={"API_TOKEN": "abcdefgh1234"},
        secrets={"KEY": {"entry": "team/key"}},
    )
    shown = yaml.safe_load(run("submit", "job.yaml", "--dry-run", "--name", "job").stdout)
    for operation in ("RegisterJobDefinition", "SubmitJob"):
        report = ParamValidator().validate(shown[operation], request_shape("batch", operation))
        assert not report.has_errors(), report.generate_report()
    made = shown["RegisterJobDefinition"]
    [nodes] = made["nodeProperties"]["nodeRangeProperties"]
    assert (made["type"], made["nodeProperties"]["numNodes"], nodes["targetNodes"]) == ("multinode", 4, "0:3")
    assert made["timeout"] == {"attemptDurationSeconds": 3600}
    assert {"type": "GPU", "value": "8"} in nodes["container"]["resourceRequirements"]
    devices = [device["hostPath"] for device in nodes["container"]["linuxParameters"]["devices"]]
    assert devices == [f"/dev/infiniband/uverbs{index}" for index in range(4)]
    sent = next(value for name, value in shown.items() if name.endswith("/hyperparameters.json"))
    assert json.loads(sent["sagemaker_smpkit_secrets"]) == {"KEY": {"entry": "team/key", "key": None}}
    assert "abcdefgh1234" not in json.dumps(shown)


@pytest.mark.usefixtures("aws")
def test_a_dry_run_without_a_region_says_what_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    write()
    assert "no AWS region is set: `<region>` stands for it" in run("submit", "job.yaml", "--dry-run").stderr


@pytest.mark.usefixtures("aws")
def test_a_job_from_submit_to_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    write(output=None)
    dry = json.loads(run("submit", "job.yaml", "--dry-run", "--json", "--name", "one").stdout)
    play_logs(monkeypatch, "one")
    a_job_that_succeeds(run, "one", ("node-0", "node-1"))
    made = sent_nodes("one")
    wanted = dry["RegisterJobDefinition"]["nodeProperties"]["nodeRangeProperties"][0]["container"]
    got = made["nodeRangeProperties"][0]["container"]
    places = [made["place"], dry["RegisterJobDefinition"]["parameters"]["smpkit_place"]]
    for text, place in zip((json.dumps(got), json.dumps(wanted)), places, strict=True):
        assert place in text
    assert json.loads(json.dumps(got).replace(places[0], "")) == json.loads(json.dumps(wanted).replace(places[1], ""))
    assert "there is a job `one` already" in run("submit", "job.yaml", "--name", "one", code=2).stderr


def play_logs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let both nodes log a line: moto runs no nodes, and knows none by the number behind the job's id."""
    logs, group = boto3.client("logs", REGION), "/aws/batch/job"
    logs.create_log_group(logGroupName=group)
    for index in range(2):
        stream = f"{name}/default/{index}"
        event = {"timestamp": int(datetime.now(timezone.utc).timestamp() * 1000), "message": f"[rank {index}] hello"}
        logs.create_log_stream(logGroupName=group, logStreamName=stream)
        logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=[event])
    described = AwsBatch._described

    def with_nodes(self: AwsBatch, ids: Sequence[str]) -> Iterable[Mapping[str, Any]]:
        nodes = [each for each in ids if "#" in each]
        if not nodes:
            return described(self, ids)
        return [{"jobId": each, "container": {"logStreamName": f"{name}/default/{each[-1]}"}} for each in nodes]

    monkeypatch.setattr(AwsBatch, "_described", with_nodes)


@pytest.mark.usefixtures("aws")
def test_a_job_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_SIMPLE_BATCH_FAIL_AFTER", "0")
    write()
    play_logs(monkeypatch, "fails")
    failures = [(NOW, "ValueError: bad batch\nrank 1 on node-1, exit 1\n")]
    monkeypatch.setattr(AwsBatch, "_failures", lambda self, place: failures)
    a_job_that_fails(run, "fails", "ValueError: bad batch", "node-1")


@pytest.mark.usefixtures("aws")
def test_a_host_reads_what_was_sent(tmp_path: Path) -> None:
    """From S3 to `/opt/ml`, as the launcher of the second node does it; and what it leaves when the job fails."""
    write(hyperparameters={"text": "a,b 'q' \"d\"\n$x"}, environment={"MODE": "fast"})
    run("submit", "job.yaml", "--name", "sent")
    made = sent_nodes("sent")
    container = made["nodeRangeProperties"][0]["container"]
    environ = {each["name"]: each["value"] for each in container["environment"]}
    environ |= {"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "2"}
    environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "10.0.0.7"
    base = tmp_path / "ml"
    assert container["command"] == ["train"]
    environ = lay_out({**environ, "SMPKIT_BASE_DIR": str(base)})
    assert (environ["SMPKIT_GRACE_SECONDS"], environ["MODE"]) == ("25", "fast")
    config = {path.stem: json.loads(path.read_text()) for path in (base / "input" / "config").glob("*.json")}
    assert json.loads(config["hyperparameters"]["text"]) == "a,b 'q' \"d\"\n$x"
    hosts = described_hosts(environ)
    assert hosts["hosts"] == ["node-0", "node-1"]
    assert (hosts["current_host"], hosts["first_address"]) == ("node-1", "10.0.0.7")

    def fetched(name: str) -> bytes:
        bucket, _, key = json.loads(config["hyperparameters"][name]).removeprefix("s3://").partition("/")
        return bytes(boto3.client("s3", REGION).get_object(Bucket=bucket, Key=key)["Body"].read())

    with tarfile.open(fileobj=io.BytesIO(fetched("sagemaker_submit_directory"))) as archive:
        assert "train.py" in archive.getnames()
    assert len(fetched("sagemaker_smpkit_token_file")) == 64
    (base / "output" / "failure").write_text("ValueError: bad batch\nrank 1 on node-1, exit 1\n")
    leave_message(base, environ)
    [(_, failure)] = AwsBatch(boto3.Session(region_name=REGION))._failures(made["place"])
    assert failure == "ValueError: bad batch\nrank 1 on node-1, exit 1\n"


def on_node(index: int, container: dict[str, Any], base: str) -> None:
    """Be the container of one node, told what Batch tells it."""
    told = {"AWS_BATCH_JOB_NODE_INDEX": str(index), "AWS_BATCH_JOB_NUM_NODES": "2", "SMPKIT_BASE_DIR": base}
    if index:
        told["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "127.0.0.1"
    written = {each["name"]: each["value"] for each in container["environment"]}
    os._exit(main(container["command"], {**os.environ, **written, **told}))


@pytest.mark.slow
@pytest.mark.usefixtures("aws")
def test_nodes_train_and_a_report_shows_what_they_measured(tmp_path: Path) -> None:
    """moto starts no nodes. Two processes with a copy of its account are theirs: the launcher's whole way from S3."""
    shared = tmp_path / "efs"
    (shared / "out").mkdir(parents=True)
    with free_ports() as port:
        write(
            SCRIPT.read_text(),
            batch={"volumes": [{"mount": str(shared), "host_path": str(shared)}], "port": port},
            output=f"{shared}/out",
            checkpoints=f"{shared}/checkpoints",
            distribution=PIPELINE,
            hyperparameters={"steps": 6},
        )
        run("submit", "job.yaml", "--name", "real")
        [node] = sent_nodes("real")["nodeRangeProperties"]
        assert "has left no measurements" in run("report", "real", code=1).stderr
        process = multiprocessing.get_context("fork").Process
        nodes = [process(target=on_node, args=(each, node["container"], f"{tmp_path}/ml-{each}")) for each in (0, 1)]
        for each in nodes:
            each.start()
        for each in nodes:
            each.join(150)
            each.kill()
    assert [each.exitcode for each in nodes] == [0, 0]
    assert (shared / "out" / "real" / "model" / "losses.txt").read_text() == uninterrupted()
    a_report_of_it(run, "real")


@pytest.mark.usefixtures("aws")
def test_resume_sends_the_same_sources_with_another_name() -> None:
    volume = {"mount": "/efs", "efs": "fs-0123abcd"}
    write(batch={"volumes": [volume]}, checkpoints="/efs/checkpoints")
    run("submit", "job.yaml", "--name", "old")
    Path("train.py").write_text("changed")
    resumed = run("resume", "old", "--name", "new", "--instance-type", "p5.48xlarge", "--instance-count", "4")
    assert "is in a volume of the nodes, which this machine does not see" in resumed.stderr
    made = sent_nodes("new")
    [nodes] = made["nodeRangeProperties"]
    assert (nodes["instanceTypes"], made["numNodes"]) == (["p5.48xlarge"], 4)
    objects = boto3.client("s3", REGION).list_objects_v2(Bucket="bucket")["Contents"]
    assert sum(item["Key"].endswith("sourcedir.tar.gz") for item in objects) == 1


@pytest.mark.usefixtures("aws")
def test_what_batch_cannot_do_is_refused_by_name() -> None:
    write(
        image=None, output="s3://bucket/out", batch={"queue": None, "role": "job", "staging": None},
        secrets={"KEY": {"variable": "MY"}},
    )  # fmt: skip
    refused = run("submit", "job.yaml", code=2).stderr
    for words in (
        "image: is required on AWS Batch",
        "backend.batch.queue: is required",
        "backend.batch.staging: is required",
        "backend.batch.role: must be the ARN of the job's role",
        "output: is no folder that containers see",
        "secrets.KEY: names no entry in AWS Secrets Manager",
    ):
        assert words in refused
    write(batch={"queue": "none"})
    assert "Job queue none does not exist" in run("submit", "job.yaml", "--name", "refused", code=4).stderr
    assert "there is no job `refused`" in run("status", "refused", code=2).stderr


@pytest.mark.usefixtures("aws")
def test_after_a_refusal_no_definition_and_no_files_stay_and_the_name_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    with monkeypatch.context() as refused:
        refused.setattr(Cloud, "ask_once", Mock(side_effect=CloudError("refused")))
        for _ in range(2):
            assert "error: refused" in run("submit", "job.yaml", "--name", "again", code=4).stderr
    kept = boto3.client("s3", REGION).list_objects_v2(Bucket="bucket")["Contents"]
    assert [item["Key"] for item in kept if "/sources/" not in item["Key"]] == []
    run("submit", "job.yaml", "--name", "again")
    assert boto3.client("batch", REGION).describe_job_definitions(status="ACTIVE")["jobDefinitions"] == []
    assert "there is a job `again` already" in run("submit", "job.yaml", "--name", "again", code=2).stderr


@pytest.mark.usefixtures("aws")
def test_a_job_runs_though_its_definition_may_not_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    ask = Cloud.ask

    def refused(self: Cloud, service: str, operation: str, doing: str, **arguments: Any) -> Any:
        if operation == "deregister_job_definition":
            raise CloudError("refused")
        return ask(self, service, operation, doing, **arguments)

    monkeypatch.setattr(Cloud, "ask", refused)
    assert run("submit", "job.yaml", "--name", "kept").stdout == "kept\n"


@pytest.mark.usefixtures("aws")
def test_doctor_looks_at_the_queue() -> None:
    write()
    findings = {item["what"]: item for item in json.loads(run("doctor", "job.yaml", "--json").stdout)}
    assert findings["queue"]["text"] == "queue `gpus` takes jobs"
    write(batch={"queue": "none"})
    found = json.loads(run("doctor", "job.yaml", "--json", code=1).stdout)
    assert "there is no queue `none` in eu-west-1" in [item["text"] for item in found]


# ---- what moto does not play -------------------------------------------------------------------------------------


@pytest.fixture
def stub() -> Iterator[Stubber]:
    """A client of Batch that answers what a test says, checked against the service's model."""
    with Stubber(boto3.Session("testing", "testing").client("batch", REGION)) as stub:
        yield stub
        stub.assert_no_pending_responses()


def batch_of(stub: Stubber) -> AwsBatch:
    return AwsBatch(Mock(region_name=REGION, client=Mock(return_value=stub.client)))


CONTAINER = {"environment": [{"name": "SMPKIT_PLACES", "value": '{"checkpoints": "/efs/c"}'}]}
NODES = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": [{"targetNodes": "0:1", "container": CONTAINER}]}
JOB = {
    "jobArn": "arn:job",
    "jobId": "1",
    "jobName": "job",
    "jobQueue": QUEUE,
    "jobDefinition": "job",
    "startedAt": 1,
    "parameters": {"smpkit_place": "s3://bucket/place"},
    "nodeProperties": NODES,
}
QUEUES = {"jobQueueName": QUEUE, "jobQueueArn": "a", "state": "ENABLED", "priority": 1, "computeEnvironmentOrder": []}
META = {"ResponseMetadata": {"RequestId": "1"}}


def expect_job(stub: Stubber, filters: Any, **facts: Any) -> None:
    stub.add_response("describe_job_queues", {"jobQueues": [QUEUES], **META}, {})
    summary = {"jobId": "1", "jobName": "job", "createdAt": 1, "status": facts["status"]}
    stub.add_response("list_jobs", {"jobSummaryList": [summary], **META}, {"jobQueue": QUEUE, "filters": filters})
    stub.add_response("describe_jobs", {"jobs": [{**JOB, **facts}], **META}, {"jobs": ["1"]})


def test_the_list_says_that_a_job_was_stopped(stub: Stubber) -> None:
    """What Batch lists does not say it: a job that somebody ended has failed there."""
    now = round(datetime.now(timezone.utc).timestamp() * 1000)
    expect_job(stub, ANY, status="FAILED", isTerminated=True, createdAt=now, stoppedAt=now)
    assert [job.status for job in batch_of(stub).list(Query("Stopped"))] == ["Stopped"]


def test_stop_terminates_a_job_that_runs_and_leaves_one_that_is_over(stub: Stubber) -> None:
    named = [{"name": "JOB_NAME", "values": ["job"]}]
    expect_job(stub, named, status="RUNNING")
    stub.add_response("terminate_job", META, {"jobId": "1", "reason": ANY})
    batch_of(stub).stop("job")
    expect_job(stub, named, status="SUCCEEDED")
    batch_of(stub).stop("job")


def test_log_streams_of_all_attempts_belong_to_their_nodes(stub: Stubber) -> None:
    first, last, before = ({"container": {"logStreamName": f"job/default/{name}"}} for name in "cdb")
    running = {**JOB, "status": "RUNNING"}
    nodes = [{**running, "jobId": "1#0", **first}, {**running, "jobId": "1#1", **last, "attempts": [before]}]
    stub.add_response("describe_jobs", {"jobs": nodes, **META}, {"jobs": ["1#0", "1#1"]})
    hosts = _Hosts({**JOB}, batch_of(stub)._described)
    assert [hosts(f"job/default/{name}") for name in "cdb"] == ["node-0", "node-1", "node-1"]


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"status": "RUNNABLE"}, ("InProgress", "Pending")),
        ({"status": "RUNNING"}, ("InProgress", "Training")),
        ({"status": "RUNNING", "isTerminated": True}, ("Stopping", "Stopping")),
        ({"status": "FAILED", "isTerminated": True, "statusReason": "smpkit stop"}, ("Stopped", "Stopped")),
        ({"status": "FAILED", "isCancelled": True}, ("Stopped", "Stopped")),
        (
            {"status": "FAILED", "statusReason": "Job attempt duration exceeded timeout"},
            ("Stopped", "MaxRuntimeExceeded"),
        ),
        ({"status": "FAILED", "statusReason": "Essential container in task exited"}, ("Failed", "Failed")),
        ({"status": "SUCCEEDED"}, ("Completed", "Completed")),
    ],
)
def test_states(facts: dict[str, Any], state: tuple[str, str]) -> None:
    found = status_of({**JOB, **facts, "stoppedAt": 5001}, [], NOW)
    assert (found.status, found.phase, found.checkpoints) == (*state, "/efs/c")


def test_attempts_are_interruptions_and_the_first_failing_rank_is_named() -> None:
    lost = {"startedAt": 1000, "stoppedAt": 3000, "statusReason": "Host EC2 (instance i-1) terminated."}
    job = {**JOB, "status": "FAILED", "startedAt": 4000, "stoppedAt": 9000, "createdAt": 500, "attempts": [lost]}
    reasons = [
        (NOW, "ended\non node-1; node-0 ended because of it"),
        (NOW + timedelta(seconds=2), "ValueError: y\nrank 0 on node-0, exit 1"),
        (NOW + timedelta(seconds=1), "ValueError: x\nrank 1 on node-1, exit 1"),
    ]
    found = status_of(job, reasons, NOW)
    assert (found.interruptions, found.billable_seconds) == (1, 7)
    assert found.failure is not None
    assert (found.failure.headline, found.failure.rank, found.failure.host) == ("ValueError: x", 1, "node-1")
    alone = status_of({**job, "container": {"exitCode": 137, "reason": "OutOfMemoryError"}}, [], NOW)
    assert (alone.failure and alone.failure.exit_code) == 137
