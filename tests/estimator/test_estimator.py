"""The estimator: SDK v2's arguments, checked at once; jobs from start to resume."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from smpkit import Estimator, TrainingInput
from smpkit.errors import CheckpointError, CloudError, ConfigError, DeadlineError, JobError, UsageError
from smpkit_estimator.job import Job
from smpkit_estimator.status import JobStatus
from tests.aws import SESSION, Aws, Line, Script
from tests.estimator.conftest import MakeEstimator
from tests.estimator.golden.cases import DISTRIBUTION, MPI, SMP

SMP_OPTIONS = {"enabled": True, "parameters": SMP}


@pytest.mark.parametrize(
    "arguments",
    [
        {"distribution": DISTRIBUTION},
        {"distribution": {**SMP_OPTIONS, "mpi": MPI}},
        {"distribution": SMP_OPTIONS, "mpi_options": MPI},
    ],
    ids=["SageMaker's dict", "mpi inside", "mpi beside"],
)
def test_every_form_of_distribution_reaches_the_job(make: MakeEstimator, arguments: dict[str, Any]) -> None:
    """SDK v2's generic Estimator swallows `distribution` without a word."""
    sent = make(**arguments).plan().body["HyperParameters"]
    assert json.loads(sent["mp_parameters"]) == SMP
    assert sent["sagemaker_mpi_enabled"] == "true"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instance_count": 0}, "instance_count: must be at least 1, got 0"),
        ({"instance_cuont": 2}, "instance_cuont: unknown argument\n    hint: did you mean `instance_count`?"),
        ({"framework_version": "2.0"}, "framework_version: has no meaning here"),
        ({"transformers_version": "4.17"}, "transformers_version: has no meaning here\n    hint: give `image_uri`"),
        # As AWS's notebooks of SMP v1 have it with FSx: SDK v2 drops it without a word.
        ({"checkpoint_local_path": "/opt/ml/input"}, "checkpoint_s3_uri: is required\n    hint: name one in"),
        ({"live_output": True}, "hint: write to `checkpoint_s3_uri`, which SageMaker uploads while the job runs"),
        ({"debugger_hook_config": True}, "debugger_hook_config: can only be switched off"),
        ({"use_spot_instances": True, "max_run": 100, "max_wait": 50}, "max_wait: must be at least"),
        # The SDK checks this only after the upload, or never; a typo here was in AWS's own sample.
        ({"distribution": {"mpi": {"enabled": True, "process_per_host": 8}}}, "did you mean `processes_per_host`?"),
        ({"distribution": DISTRIBUTION, "mpi_options": MPI}, "mpi_options: is given twice"),
        ({"tags": {"a": 1}}, "tags.a: "),
        ({"tags": [{"Key": "aws:team", "Value": "x"}]}, "tags.aws:team: is a key that AWS keeps for itself"),
        ({"tags": {"": "x"}}, "tags.``: the key of a tag must have 1 to 128 characters"),
        ({"metric_definitions": [{"Name": "x", "Regex": "loss=.*"}]}, "must have a group around the number"),
        ({"environment": {"A": "x"}, "secrets": {"A": "y"}}, "secrets.A: is in `environment` too"),
        ({"secrets": {"A": {"variable": "a b"}}}, "secrets.A.variable: a variable's name must have"),
        ({"secrets": {"1": "y"}}, "secrets.1: a variable's name must have"),
        ({"base_job_name": "a" * 80}, "hint: shorten it"),
        ({"metric_definitions": [{"Name": "x", "Regex": "("}]}, "metric_definitions.x: is not a regular expression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_the_constructor_refuses_what_is_wrong(make: MakeEstimator, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(**arguments)


def test_it_says_what_it_is_in_one_line(make: MakeEstimator) -> None:
    assert repr(make(instance_count=2)) == "Estimator('train.py' on 2 × ml.p4d.24xlarge)"


def test_all_problems_come_at_once(make: MakeEstimator) -> None:
    with pytest.raises(ConfigError, match="3 problems in the arguments of Estimator"):
        make(volume_size=0, max_run="x", nonsense=1)


def test_what_only_the_cloud_minds_is_told_before_the_upload(make: MakeEstimator, aws: Aws, tmp_path: Path) -> None:
    estimator = make(
        image_uri=None,
        role=None,
        instance_type="local_gpu",
        output_path="out",
        checkpoint_s3_uri="here",
        environment={"A": "x" * 600},
        hyperparameters={"corpus": "x" * 3000},
    )
    with pytest.raises(ConfigError) as caught:
        estimator.fit("data")
    assert "instance_type: is `local_gpu`, which is this machine" in str(caught.value)
    places = [problem.where for problem in caught.value.problems]
    assert places == [
        *("image_uri", "role", "instance_type", "inputs.training.uri", "output_path", "checkpoint_s3_uri"),
        *("hyperparameters.corpus", "environment.A"),
    ]
    with pytest.raises(ConfigError, match="job_name: `a_b` does not fit"):
        make().plan(job_name="a_b")
    assert all(problem.hint for problem in caught.value.problems)
    assert not aws.calls


def test_the_same_sources_are_uploaded_once(make: MakeEstimator, aws: Aws) -> None:
    make().fit(wait=False, job_name="first")
    make().fit(wait=False, job_name="second")
    assert aws.calls["PutObject"] == 1
    Path("train.py").write_text("changed")
    make().fit(wait=False, job_name="third")
    assert aws.calls["PutObject"] == 2


def test_without_a_source_dir_only_the_script_travels(make: MakeEstimator, tmp_path: Path) -> None:
    (tmp_path / "private.txt").write_text("x")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").touch()
    planned = make(dependencies=["lib"]).plan()
    assert planned.packed is not None
    assert [entry.name for entry in planned.packed.sources.entries] == ["lib/a.py", "train.py"]


def test_sources_in_s3_are_left_there_and_others_go_where_code_location_says(make: MakeEstimator) -> None:
    planned = make(source_dir="s3://bucket/code/sourcedir.tar.gz").plan()
    assert json.loads(planned.body["HyperParameters"]["sagemaker_submit_directory"]) == planned.source
    assert planned.packed is None
    with pytest.raises(ConfigError, match=r"must be a `\.tar\.gz`"):
        make(source_dir="s3://bucket/code").plan()
    planned = make(code_location="s3://bucket/team/code").plan()
    assert (planned.source or "").startswith("s3://bucket/team/code/")


def test_an_unnamed_output_goes_to_the_accounts_own_bucket(make: MakeEstimator) -> None:
    SESSION.client("iam").create_role(RoleName="SM", AssumeRolePolicyDocument="{}")
    planned = make(output_path=None, role="SM").plan()
    assert planned.body["OutputDataConfig"] == {"S3OutputPath": "s3://sagemaker-us-west-2-123456789012/"}
    assert planned.body["RoleArn"] == "arn:aws:iam::123456789012:role/SM"


def test_one_input_sets_the_mode_of_the_job_as_in_the_sdk(make: MakeEstimator) -> None:
    body = make().plan(TrainingInput("s3://bucket/x", input_mode="Pipe")).body
    assert body["AlgorithmSpecification"]["TrainingInputMode"] == "Pipe"
    assert body["InputDataConfig"][0]["ChannelName"] == "training"


def test_fit_shows_the_log_until_the_end(make: MakeEstimator, aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    aws.script = Script(lines=(Line(1, "[rank 0] hello"),))
    job = make().fit()
    out, err = capsys.readouterr()
    assert out == "algo-1 [rank 0] hello\n"
    assert "Completed" in err
    assert job.model_data == f"s3://bucket/out/{job.name}/output/model.tar.gz"
    assert job.status().succeeded


REASON = """AlgorithmError: ValueError: hidden size 2050 is not divisible by 4
rank 5 on algo-1, exit 1
hint: choose another size
  File "train.py", line 41, in build
, exit code: 1"""


def test_a_failed_job_raises_with_the_first_failing_ranks_exception(make: MakeEstimator, aws: Aws) -> None:
    aws.script = Script(failure=REASON)
    with pytest.raises(JobError) as caught:
        make().fit(logs=False)
    assert "failed (rank 5 on algo-1, exit 1): ValueError: hidden size 2050 is not divisible by 4" in str(caught.value)
    assert 'File "train.py", line 41' in str(caught.value)
    assert caught.value.hint == "choose another size"


def test_the_reason_of_another_host_names_the_rank_too(make: MakeEstimator, aws: Aws) -> None:
    reason = "rank 5: ValueError: boo\nwith 2 lines\non algo-2; algo-1 ended because of it"
    aws.script = Script(failure=f"AlgorithmError: {reason}, exit code: 1")
    with pytest.raises(JobError, match=r"failed \(rank 5 on algo-2, exit 1\): ValueError: boo\nwith 2 lines"):
        make().fit(logs=False)


def test_an_interrupt_never_stops_the_job(make: MakeEstimator, aws: Aws, capsys: pytest.CaptureFixture[str]) -> None:
    aws.fail("DescribeTrainingJob", KeyboardInterrupt(), after=3)
    estimator = make()
    with pytest.raises(KeyboardInterrupt):
        estimator.fit()
    assert "goes on" in capsys.readouterr().err
    assert estimator.latest_training_job.name in aws.jobs
    assert not aws.calls["StopTrainingJob"]


def test_tuples_are_lists_as_in_json(make: MakeEstimator) -> None:
    sent = make(hyperparameters={"betas": (0.9, (1, 2))}).plan().body["HyperParameters"]
    assert sent["betas"] == "[0.9, [1, 2]]"


def test_a_notebook_is_warned_of_secrets_too(make: MakeEstimator, capsys: pytest.CaptureFixture[str]) -> None:
    make(environment={"HF_TOKEN": "abc123"}, secrets={"B": "x"}).fit(wait=False)
    said = capsys.readouterr().err
    assert "warning: environment.HF_TOKEN: looks like a secret" in said
    assert "abc123" not in said


def test_stop_waits_and_attach_finds(make: MakeEstimator, aws: Aws) -> None:
    aws.script = Script(training=10_000)
    make().fit(wait=False, job_name="job")
    Estimator.attach("job", SESSION)
    job = Job("job", aws.open())
    aws.clock.advance(200)
    job.stop(wait=True)
    job.stop()  # is over already: nothing to do
    with pytest.raises(JobError, match="was stopped"):
        job.check()
    with pytest.raises(UsageError, match="no job `other`"):
        Estimator.attach("other", SESSION)
    with pytest.raises(UsageError, match="no job was started"):
        _ = make().latest_training_job


def test_waiting_has_a_deadline_and_says_what_for(make: MakeEstimator, aws: Aws) -> None:
    aws.script = Script(training=10_000)
    job = make().fit(wait=False)
    with pytest.raises(DeadlineError, match=r"waited 95 s for job .* which is Training"):
        job.wait(timeout=95)


def test_resume_goes_on_with_the_same_sources_and_checkpoints(make: MakeEstimator, aws: Aws) -> None:
    estimator = make(checkpoint_s3_uri="s3://bucket/ckpt", tags={"team": "x"}, hyperparameters={"lr": 0.1})
    first = estimator.fit(wait=False)
    first.wait()
    second = estimator.resume(wait=False)
    old, new = dict(aws.jobs[first.name].request), dict(aws.jobs[second.name].request)
    assert new["HyperParameters"].pop("sagemaker_job_name") == json.dumps(second.name)
    assert old["HyperParameters"].pop("sagemaker_job_name") == json.dumps(first.name)
    assert new.pop("Tags") == [*old.pop("Tags"), {"Key": "smpkit:resumed-from", "Value": first.name}]
    assert {**old, "TrainingJobName": ""} == {**new, "TrainingJobName": ""}
    changed = first.resumed("third", {"InstanceCount": 4, "MaxRuntimeInSeconds": 7}).shown
    assert changed["ResourceConfig"]["InstanceCount"] == 4
    assert changed["StoppingCondition"]["MaxRuntimeInSeconds"] == 7


def test_a_job_without_checkpoints_cannot_be_resumed(make: MakeEstimator) -> None:
    job = make().fit(wait=False)
    for ask in (job.resume, lambda: job.latest_checkpoint):
        with pytest.raises(CheckpointError, match="keeps no checkpoints"):
            ask()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"step_1_partial/index.json": b"", "newest": b"step_1_partial"}, "step_1_partial"),
        ({"a.pt": b"", "b.pt": b""}, "b.pt"),
        ({"a.pt": b"", "b.pt.sagemaker-uploading": b"", ".c.0123.tmp": b""}, "a.pt"),
        ({"a_partial/index.json": b"", "b_partial/model_0_0.pt": b""}, "a_partial"),
        ({"a_partial/index.json": b"", "newest": b"gone_partial"}, "a_partial"),
        ({"a.pt": b"", "user_content_a.pt": b""}, "a.pt"),
        ({"other/x": b"", "newest": b"../../elsewhere"}, "other"),
    ],
    ids=["none", "named", "latest", "half-written", "no index", "named is gone", "user content", "hostile"],
)
def test_the_latest_checkpoint_is_whole(
    make: MakeEstimator, aws: Aws, files: dict[str, bytes], expected: str | None
) -> None:
    """amazon-sagemaker-examples#1518: half-written helper files lie beside the checkpoints."""
    job = make(checkpoint_s3_uri="s3://bucket/ckpt/").fit(wait=False)
    aws.put("s3://bucket/ckpt-of-another/z.pt")
    for name, content in files.items():
        aws.clock.advance(1)
        aws.put(f"s3://bucket/ckpt/{name}", content)
    assert job.latest_checkpoint == (f"s3://bucket/ckpt/{expected}" if expected else None)


QUOTA = (
    "The account-level service limit 'ml.p4d.24xlarge for training job usage' is 1 Instances, with current "
    "utilization of 1 Instances and a request delta of 2 Instances. Please use AWS Service Quotas."
)


@pytest.mark.parametrize(
    ("operation", "code", "message", "said", "hint"),
    [
        ("CreateTrainingJob", "AccessDeniedException", "not allowed", "not allowed", "sagemaker:CreateTrainingJob"),
        ("CreateTrainingJob", "ResourceLimitExceeded", "no", "no", "Service Quotas"),
        ("CreateTrainingJob", "ResourceLimitExceeded", QUOTA, "usage` is 1, 1 in use and 2 more", "Service Quotas"),
        ("PutObject", "NoSuchBucket", "x", "the bucket does not exist", "aws s3 mb"),
        ("PutObject", "AccessDenied", "Access Denied", "Access Denied", "s3:PutObject"),
        ("CreateTrainingJob", "UnrecognizedClientException", "x", "does not know these credentials", "doctor"),
    ],
)
def test_refusals_are_in_plain_words(
    make: MakeEstimator, aws: Aws, operation: str, code: str, message: str, said: str, hint: str
) -> None:
    aws.fail(operation, code, message)
    with pytest.raises(CloudError) as caught:
        make().fit(wait=False)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


def test_an_upload_after_throttling_sends_everything(make: MakeEstimator, aws: Aws) -> None:
    aws.fail("PutObject", "SlowDown", "reduce", times=2)
    estimator = make()
    planned = estimator.plan()
    estimator.fit(wait=False)
    with tarfile.open(fileobj=io.BytesIO(aws.objects()[planned.source or ""]), mode="r:gz") as tar:
        assert tar.getnames() == ["train.py"]


def test_status_counts_time_and_interruptions(make: MakeEstimator, aws: Aws) -> None:
    aws.script = Script(interruptions=(30.0,))
    job = make(use_spot_instances=True).fit(wait=False)
    aws.clock.advance(60 + 20 + 30 + 50)
    status: JobStatus = job.status()
    assert (status.phase, status.interruptions, status.billable_so_far, status.seconds) == ("Interrupted", 1, 50, 160)
