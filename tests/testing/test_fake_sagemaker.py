"""The fake lives through a job as SageMaker does, and keeps to botocore's description of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ParamValidationError

from smpkit.testing import FakeSageMaker, FastClock, Line, Script
from smpkit_estimator.sagemaker import code_of

REQUEST: dict[str, Any] = {
    "TrainingJobName": "job",
    "RoleArn": "arn:aws:iam::123456789012:role/SM",
    "AlgorithmSpecification": {"TrainingInputMode": "File", "TrainingImage": "image"},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
    "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 30},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    "Tags": [{"Key": "team", "Value": "x"}],
}

SCRIPT = Script(starting=10, downloading=10, training=100, uploading=10, saving=5)


def started(script: Script = SCRIPT, **changes: Any) -> tuple[FakeSageMaker, Any]:
    fake = FakeSageMaker(script)
    client = fake.client("sagemaker")
    client.create_training_job(**{**REQUEST, **changes})
    return fake, client


def life(fake: FakeSageMaker, client: Any, step: float = 1.0) -> list[tuple[str, str]]:
    """Return every pair of statuses that somebody who looks all the time sees."""
    seen: list[tuple[str, str]] = []
    for _ in range(5000):
        answer = client.describe_training_job(TrainingJobName="job")
        pair = (answer["TrainingJobStatus"], answer["SecondaryStatus"])
        seen += [pair] if pair not in seen[-1:] else []
        if pair[0] in ("Completed", "Failed", "Stopped"):
            return seen
        fake.clock.advance(step)
    raise AssertionError("never over")


GOOD = [("InProgress", phase) for phase in ("Starting", "Downloading", "Training", "Uploading")]


def test_a_good_job_goes_through_all_phases() -> None:
    fake, client = started()
    assert life(fake, client) == [*GOOD, ("Completed", "Completed")]
    answer = client.describe_training_job(TrainingJobName="job")
    assert answer["ModelArtifacts"] == {"S3ModelArtifacts": "s3://bucket/out/job/output/model.tar.gz"}
    assert answer["BillableTimeInSeconds"] == 120
    assert [part["Status"] for part in answer["SecondaryStatusTransitions"]][-1] == "Completed"


def test_a_failing_job_has_a_reason() -> None:
    fake, client = started(Script(failure="AlgorithmError: boo"))
    assert life(fake, client)[-1] == ("Failed", "Failed")
    assert client.describe_training_job(TrainingJobName="job")["FailureReason"] == "AlgorithmError: boo"


@pytest.mark.parametrize(("after", "phases"), [(5, ["Starting"]), (15, ["Starting", "Downloading"]), (50, None)])
def test_a_job_can_be_stopped_in_every_phase(after: float, phases: list[str] | None) -> None:
    fake, client = started()
    fake.clock.advance(after)
    client.stop_training_job(TrainingJobName="job")
    seen = life(fake, client)
    assert seen[0] == ("Stopping", "Stopping")
    assert seen[-1] == ("Stopped", "Stopped")
    assert (("Stopping", "Uploading") in seen) == (phases is None)
    with pytest.raises(ClientError, match="is in status Stopped"):
        client.stop_training_job(TrainingJobName="job")


def test_a_job_that_runs_too_long_is_stopped() -> None:
    fake, client = started(StoppingCondition={"MaxRuntimeInSeconds": 50})
    assert life(fake, client)[-1] == ("Stopped", "MaxRuntimeExceeded")


def test_spot_capacity_is_taken_away_and_comes_back() -> None:
    fake, client = started(Script(interruptions=(30.0, 10.0), lines=(Line(1, "x"),)), EnableManagedSpotTraining=True)
    phases = [phase for _, phase in life(fake, client)]
    assert phases.count("Interrupted") == 2
    assert phases.count("Training") == 3
    streams = fake.client("logs").describe_log_streams(
        logGroupName="/aws/sagemaker/TrainingJobs", logStreamNamePrefix="job/"
    )
    assert len(streams["logStreams"]) == 3
    answer = client.describe_training_job(TrainingJobName="job")
    assert answer["BillableTimeInSeconds"] < answer["TrainingTimeInSeconds"]


def test_spot_does_not_wait_for_ever() -> None:
    limits = {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": 150}
    fake, client = started(Script(interruptions=(30.0,), waiting=1000), StoppingCondition=limits)
    assert life(fake, client)[-1] == ("Stopped", "MaxWaitTimeExceeded")


def refusal(code: str) -> Any:
    return pytest.raises(ClientError, check=lambda error: code_of(error) == code)


def test_refusals_of_the_service() -> None:
    fake, client = started()
    with refusal("ResourceInUse"):
        client.create_training_job(**REQUEST)
    with refusal("ValidationException"):
        client.create_training_job(**{**REQUEST, "TrainingJobName": "a_b"})
    with refusal("ValidationException"):
        client.describe_training_job(TrainingJobName="none")
    with refusal("ValidationException"):
        client.stop_training_job(TrainingJobName="none")
    fake.faults.add("describe_training_job", "ThrottlingException", "Rate exceeded", times=2, after=1)
    client.describe_training_job(TrainingJobName="job")
    for _ in range(2):
        with refusal("ThrottlingException"):
            client.describe_training_job(TrainingJobName="job")
    client.describe_training_job(TrainingJobName="job")


def test_quotas_count_what_runs() -> None:
    fake = FakeSageMaker(SCRIPT, quotas={"ml.m5.large": 1})
    client = fake.client("sagemaker")
    client.create_training_job(**REQUEST)
    second = {**REQUEST, "TrainingJobName": "second"}
    with refusal("ResourceLimitExceeded"):
        client.create_training_job(**second)
    fake.clock.advance(1000)
    client.create_training_job(**second)


def test_requests_and_answers_keep_to_the_service_model() -> None:
    _, client = started()
    with pytest.raises(ParamValidationError, match="Unknown parameter"):
        client.describe_training_job(TrainingJobName="job", Nonsense=1)
    with pytest.raises(AttributeError, match="no operation"):
        client.describe_training_jobs()
    with pytest.raises(NotImplementedError):
        client.create_auto_ml_job()


def test_listing_filters_and_pages() -> None:
    fake, client = started()
    for number in range(12):
        fake.clock.advance(1)
        client.create_training_job(**{**REQUEST, "TrainingJobName": f"other-{number}"})
    first = client.list_training_jobs()
    assert [item["TrainingJobName"] for item in first["TrainingJobSummaries"]][:2] == ["other-11", "other-10"]
    rest = client.list_training_jobs(NextToken=first["NextToken"])
    assert len(rest["TrainingJobSummaries"]) == 3
    assert len(client.list_training_jobs(NameContains="other-1")["TrainingJobSummaries"]) == 3
    fake.clock.advance(1000)
    assert len(client.list_training_jobs(StatusEquals="Completed", MaxResults=100)["TrainingJobSummaries"]) == 13
    assert client.list_tags(ResourceArn=fake.jobs["job"].arn)["Tags"] == REQUEST["Tags"]


def test_a_job_outlives_the_process_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "jobs.json"
    script = Script(
        lines=(Line(1, "x", host=1),), silent_hosts=frozenset({2}), interruptions=(3.0,), metrics={"a": 1.0}
    )
    first = FakeSageMaker(script, file=file)
    first.client("sagemaker").create_training_job(**REQUEST)
    first.clock.advance(3)
    first.client("sagemaker").stop_training_job(TrainingJobName="job")
    second = FakeSageMaker(file=file)
    assert second.jobs == first.jobs


def test_a_fast_clock_is_shared_by_its_origin() -> None:
    origin = FakeSageMaker().now
    first, second = FastClock(1000, origin), FastClock(1000, origin)
    before = first.now()
    first.sleep(20)
    assert (second.now() - before).total_seconds() >= 20
