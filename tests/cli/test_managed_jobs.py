"""The commands for managed jobs, on an AWS account in memory: what they print where, and their exit codes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from smpkit.cli.options import BackendChoice
from smpkit.config.wire import TOKEN_FILE
from smpkit_estimator.aws import Cloud
from smpkit_estimator.sagemaker import SageMaker
from tests.aws import SESSION, Aws, Line, Script, aws
from tests.cli.conftest import Smpkit
from tests.job_contract import a_job_that_fails, a_job_that_succeeds

__all__ = ["aws"]

JOB = """\
entry_point: train.py
image: 123456789012.dkr.ecr.us-west-2.amazonaws.com/smpkit:latest
role: arn:aws:iam::123456789012:role/SM
output: s3://bucket/out
checkpoints: s3://bucket/ckpt
compute: {instance_type: ml.p4d.24xlarge, instance_count: 2}
"""

REASON = 'AlgorithmError: ValueError: boo\nrank 5 on algo-1, exit 1\n  File "train.py", line 4, in f\n, exit code: 1'
LINES = (Line(1, "[rank 0] one"), Line(2, "[rank 8] two", 1), Line(3, "[rank 0] three"))

Use = Callable[..., Aws]


@pytest.fixture
def use(here: Path, aws: Aws, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Put a job into the current folder, and an account in memory, with jobs of one's choice, in place of the cloud.

    With `ago`, `job` was submitted so many seconds ago.
    """
    (here / "train.py").touch()
    (here / "job.yaml").write_text(JOB)

    def use(script: Script | None = None, ago: float | None = None) -> Aws:
        aws.script = script or Script(lines=LINES, training=10)
        aws.jobs.clear()
        backend = aws.open()
        monkeypatch.setattr(BackendChoice, "open", lambda *_: backend)
        if ago is not None:
            smpkit("submit", "job.yaml", "--name", "job", code=0)
            aws.clock.advance(ago)
        return aws

    return use


def test_what_a_job_looks_like_on_every_back_end(use: Use, smpkit: Smpkit) -> None:
    run = partial(smpkit, code=0)
    use()
    a_job_that_succeeds(run, "good", ("algo-1", "algo-2"), rank=8)
    aws = use(Script(lines=LINES, training=10, failure=REASON))
    a_job_that_fails(run, "bad", "ValueError: boo", "algo-1", rank=5)
    assert list(aws.jobs) == ["bad"]


def test_submit_prints_the_name_alone_and_talks_on_stderr(use: Use, smpkit: Smpkit) -> None:
    aws = use()
    result = smpkit("submit", "job.yaml", code=0)
    (name,) = aws.jobs
    assert result.stdout == f"{name}\n"
    assert result.stderr.splitlines() == [
        "Submitting `train` to SageMaker in us-west-2 (2 × ml.p4d.24xlarge, at most 24 h 0 m)",
        f"Follow with `smpkit logs -f {name}`, stop with `smpkit stop {name}`",
    ]
    Path(".env").write_text("TOKEN=1")
    assert "note: left out, as secrets are never packed: `.env`" in smpkit("submit", "job.yaml").stderr


def without_token(request: Any) -> Any:
    """Return a request of a job with several hosts without the place of their token, which is new each time."""
    assert request["HyperParameters"][TOKEN_FILE]
    return {**request, "HyperParameters": {k: v for k, v in request["HyperParameters"].items() if k != TOKEN_FILE}}


def test_the_token_of_several_hosts_is_in_s3_alone(use: Use, smpkit: Smpkit) -> None:
    """Whoever may describe the job reads its hyperparameters and its environment."""
    aws = use(ago=0)
    request = aws.jobs["job"].request
    place = json.loads(request["HyperParameters"][TOKEN_FILE])
    token = aws.objects()[place].decode()
    assert len(bytes.fromhex(token)) == 32
    assert token not in json.dumps(request, default=str)
    assert place.startswith(json.loads(request["HyperParameters"]["sagemaker_submit_directory"]).rsplit("/", 2)[0])
    smpkit("submit", "job.yaml", "--name", "one", "--set", "compute.instance_count=1", code=0)
    assert TOKEN_FILE not in aws.jobs["one"].request["HyperParameters"]


@pytest.mark.parametrize(("command", "read"), [("submit --json", json.loads), ("-q submit", yaml.safe_load)])
def test_dry_run_prints_the_request_alone(use: Use, smpkit: Smpkit, command: str, read: Callable[[str], Any]) -> None:
    """SDK v3's dry run uploads 16 objects."""
    aws = use()
    result = smpkit(*command.split(), "job.yaml", "--dry-run", "--name", "job", code=0)
    assert not aws.calls
    assert not aws.jobs
    assert not aws.objects()
    smpkit("submit", "job.yaml", "--name", "job")
    assert without_token(read(result.stdout)) == without_token(aws.jobs["job"].request)


def test_problems_have_the_files_line(use: Use, smpkit: Smpkit) -> None:
    use()
    text = JOB.replace("output: s3://bucket/out", "output: ./out") + f"environment: {{A: {'x' * 600}}}\n"
    Path("job.yaml").write_text(text)
    result = smpkit("submit", "job.yaml", "--set", "compute.instance_type=ml.p4d.2xlarge", code=2)
    assert result.stdout == ""
    assert "job.yaml:4: output: is a folder of this machine, `./out`" in result.stderr
    assert "job.yaml:7: environment.A: has 600 characters, SageMaker takes at most 512" in result.stderr
    assert "\n--set compute.instance_type: `ml.p4d.2xlarge` is not one of" in result.stderr
    assert "did you mean `ml.p4d.24xlarge`?" in result.stderr
    assert result.stderr.rstrip().endswith("3 problems in the job for SageMaker")


SECRET_VALUES = ("s3cr3t-1", "hf_" + "a1B2" * 9)


def test_secrets_are_shown_nowhere_and_warned_of(use: Use, smpkit: Smpkit) -> None:
    aws = use()
    name, token = SECRET_VALUES
    lines = f"environment: {{WANDB_API_KEY: {name}, OK: fine}}\nhyperparameters: {{note: {token}, password: {name}}}\n"
    Path("job.yaml").write_text(JOB + lines)
    said = ""
    for command in (
        *("validate job.yaml", "validate job.yaml --show-origin", "validate job.yaml --show-origin --json"),
        *("submit job.yaml --dry-run", "submit job.yaml --dry-run --json", "submit job.yaml --name job"),
        *("resume job --dry-run", "submit job.yaml --set environment.A=" + "x" * 600),
    ):
        result = smpkit(*command.split())
        said += result.stdout + result.stderr
    assert not [value for value in SECRET_VALUES if value in said]
    assert "fine" in said
    assert "(hidden)" in said
    assert aws.jobs["job"].request["Environment"]["WANDB_API_KEY"] == name
    warned = smpkit("submit", "job.yaml", "--dry-run").stderr
    assert "warning: job.yaml:7: environment.WANDB_API_KEY: looks like a secret, and whoever may describe" in warned
    assert "hyperparameters.password: looks like a secret" in warned
    assert "environment.OK" not in warned


def test_declared_secrets_are_named_and_never_sent(use: Use, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch) -> None:
    aws = use()
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    Path("job.yaml").write_text(JOB + "secrets: {HF_TOKEN: team/hf, W: {entry: team/all, key: wandb}}\n")
    result = smpkit("submit", "job.yaml", "--name", "job", code=0)
    assert "looks like" not in result.stderr
    sent = aws.jobs["job"].request
    assert json.loads(sent["HyperParameters"]["sagemaker_smpkit_secrets"]) == {
        "HF_TOKEN": {"entry": "team/hf", "key": None},
        "W": {"entry": "team/all", "key": "wandb"},
    }
    assert "s3cr3t" not in json.dumps(sent)
    refused = smpkit("submit", "job.yaml", "--set", "secrets={A: {variable: B}}", "--set", "network.isolation=true")
    assert "secrets.A: names no entry in AWS Secrets Manager" in refused.stderr
    refused = smpkit("submit", "job.yaml", "--set", "network.isolation=true")
    assert "secrets.HF_TOKEN: cannot be read by a container without network" in refused.stderr


def test_neither_log_nor_reason_drives_the_terminal(use: Use, smpkit: Smpkit) -> None:
    use(Script(lines=(Line(1, "\x1b]52;c;AAAA\x07\x1b[2J\x1b[31mred\x1b[0m a\rb"),), training=10), ago=1000)
    shown = "\\x1b]52;c;AAAA\\x07\\x1b[2J\x1b[31mred\x1b[0m a\\rb"
    for command in (["logs", "job"], ["logs", "-f", "job"]):
        assert smpkit(*command, color=True).stdout.partition(" ")[2].strip() == shown
    assert json.loads(smpkit("logs", "job", "--json").stdout)["text"].startswith("\x1b]52")
    use(Script(failure="ValueError: \x1b]0;x\x07boo\nrank 5 on algo-1, exit 1", training=10), ago=0)
    assert "    ValueError: \\x1b]0;x\\x07boo\n" in smpkit("status", "--watch", "job").stdout


@pytest.mark.parametrize(
    "command",
    [
        *("submit job.yaml --name job --wait", "submit job.yaml --name job -f"),
        *("status job --watch", "logs job -f", "logs job -f --rank 0"),
    ],
)
def test_a_failed_job_is_exit_code_1_with_the_first_ranks_exception(use: Use, smpkit: Smpkit, command: str) -> None:
    use(Script(failure=REASON, training=10), ago=None if command.startswith("submit") else 0)
    result = smpkit(*command.split(), code=1)
    shown = result.stdout if command.startswith("status") else result.stderr
    assert "Failed after 1 m 40 s (rank 5 on algo-1, exit 1)\n\n    ValueError: boo\n" in shown
    assert '      File "train.py", line 4, in f' in shown
    assert "hint: `smpkit logs job --rank 5 --tail 50`" in result.stderr


def test_ctrl_c_never_stops_the_job(use: Use, smpkit: Smpkit) -> None:
    aws = use(Script(training=10_000), ago=0)
    for command in (["logs", "-f", "job"], ["status", "--watch", "job"], ["logs", "-f", "job", "--rank", "0"]):
        aws.fail("DescribeTrainingJob", KeyboardInterrupt(), after=2)
        result = smpkit(*command, code=130)
        assert "`job` goes on" in result.stderr
        assert "`smpkit stop job` stops it" in result.stderr
    assert not aws.calls["StopTrainingJob"]


def test_status_while_it_runs_and_after(use: Use, smpkit: Smpkit) -> None:
    aws = use(Script(training=100), ago=100)
    running = smpkit("status", "job", code=0)
    assert running.stdout.splitlines()[:2] == [
        "Training for 20 s, 1 m 40 s since it was created",
        "machines    2 × ml.p4d.24xlarge, so far 40 s billable each",
    ]
    aws.jobs["job"].more["FinalMetricDataList"] = [{"MetricName": "loss", "Value": 0.5, "Timestamp": 0}]
    aws.clock.advance(1000)
    done = smpkit("status", "job").stdout
    assert done.startswith("Completed after 3 m 10 s\n")
    assert "model       s3://bucket/out/job/output/model.tar.gz" in done
    assert "metric      loss = 0.5" in done


def test_watch_shows_every_phase(use: Use, smpkit: Smpkit) -> None:
    use(Script(interruptions=(20.0,)))
    smpkit("submit", "job.yaml", "--name", "job", "--set", "compute.spot=true")
    result = smpkit("status", "job", "--watch")
    phases = re.findall(r"  (\w+): ", result.stderr)
    first = ["Starting", "Downloading", "Training"]
    assert phases == [*first, "Interrupted", *first, "Uploading"]
    narrow, wide = (smpkit("status", "job", env={"COLUMNS": columns}).stdout for columns in ("60", "200"))
    (whole,) = [line for line in wide.splitlines() if line.startswith("phases")]
    shown = narrow[narrow.index("phases") : narrow.index("\nmodel")]
    assert len(whole) > 60 >= max(map(len, shown.splitlines()))
    assert re.sub(r"\n +", " · ", shown) == whole
    assert "interrupted 1 time\n" in result.stdout


@pytest.mark.parametrize("command", ["submit job.yaml", "resume job", "doctor"])
def test_json_is_json_and_alone_on_stdout(use: Use, smpkit: Smpkit, command: str) -> None:
    use(ago=1000)
    assert json.loads(smpkit(*command.split(), "--json", code=0).stdout)


def test_jobs_are_listed_newest_first_and_filtered(use: Use, smpkit: Smpkit) -> None:
    aws = use(Script(training=1))
    assert [smpkit("jobs", *options).stdout for options in ((), ("--json",))] == ["", "[]\n"]
    for number in range(25):
        smpkit("submit", "job.yaml", "--name", f"job-{number}")
        aws.clock.advance(60)
    names = [line.split()[0] for line in smpkit("jobs").stdout.splitlines()]
    assert names == [f"job-{number}" for number in range(24, 4, -1)]
    assert len(smpkit("jobs", "--limit", "100", "--since", "10m").stdout.splitlines()) == 10
    assert len(smpkit("jobs", "--name", "job-2").stdout.splitlines()) == 6
    assert "Completed" in smpkit("jobs", "--status", "completed", "--limit", "1").stdout


def test_logs_choose(use: Use, smpkit: Smpkit) -> None:
    use(ago=1000)
    assert smpkit("logs", "job").stdout.count("\n") == 3
    assert smpkit("logs", "job", "--rank", "8").stdout == "algo-2 [rank 8] two\n"
    assert smpkit("logs", "job", "--host", "algo-1", "--tail", "1").stdout == "algo-1 [rank 0] three\n"
    assert smpkit("logs", "job", "--grep", "o[nw]e").stdout == "algo-1 [rank 0] one\n"
    assert smpkit("logs", "job", "-f", "--tail", "1").stdout == "algo-2 [rank 8] two\nalgo-1 [rank 0] three\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--since 1s", "since 20"),
        ("--rank 9 --rank 10", "of rank 9 or 10\n"),
        ("--host algo-3 --json", "from `algo-3`\n"),
        ("--grep four --rank 8 --tail 2", "of rank 8, that matches `four`\n"),
        ("-f --grep four", "that matches `four`\n"),
    ],
)
def test_logs_say_that_no_line_is_wanted(use: Use, smpkit: Smpkit, options: str, words: str) -> None:
    use(ago=1000)
    result = smpkit("logs", "job", *options.split(), code=0)
    assert result.stdout == ""
    (sentence,) = [line for line in result.stderr.splitlines(keepends=True) if "no line" in line]
    assert sentence.startswith(f"the log has no line {words}")
    assert "no line" not in smpkit("logs", "job", "--rank", "8").stderr
    assert smpkit("logs", "job", "--tail", "0", "--rank", "9").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logs", "job", "--grep", "("], "is not a regular expression"),
        (["logs", "job", "--since", "ten"], "`ten` is not a length of time"),
        (["logs", "none"], "there is no job `none` in us-west-2"),
        (["stop", "none"], "there is no job `none`"),
        (["resume", "none"], "there is no job `none`"),
        (["jobs", "--since", "999999d"], "is longer than 36,500 days"),
        (["jobs", "--limit", "9" * 30], "is not in the range"),
        (["status", "job.yaml"], "job.yaml"),
        (["stop", "a b"], "a b"),
        (["logs", "-f", "x" * 64], "x" * 50),
        (["submit", "job.yaml", "--name", "a b"], "--name: `a b` does not fit"),
        (["submit", "job.yaml", "--set", "image=foo"], "names no registry, so SageMaker cannot pull it: `foo`"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(use: Use, smpkit: Smpkit, arguments: list[str], message: str) -> None:
    aws = use()
    result = smpkit(*arguments, code=2)
    assert (result.stdout, message in result.stderr) == ("", True)
    assert "none" in arguments or not aws.calls  # the cloud is asked about jobs alone


@pytest.mark.parametrize("command", ["submit job.yaml", "jobs", "status job", "logs job", "stop job"])
def test_a_cloud_that_refuses_is_exit_code_4(use: Use, smpkit: Smpkit, command: str) -> None:
    aws = use()
    for operation in ("HeadObject", "ListTrainingJobs", "DescribeTrainingJob"):
        aws.fail(operation, "ExpiredTokenException", "The security token is expired", times=9)
    result = smpkit(*command.split(), code=4)
    assert result.stdout == ""
    assert "the AWS credentials have expired" in result.stderr
    assert "aws sso login" in result.stderr


def test_stop_tells_what_was_saved(use: Use, smpkit: Smpkit) -> None:
    aws = use(Script(training=10_000), ago=0)
    smpkit("submit", "job.yaml", "--name", "none")
    aws.clock.advance(500)
    said = smpkit("stop", "none", "--wait").stderr
    assert "no checkpoint was saved\nhint: `smpkit resume none` starts from the beginning\n" in said
    aws.put("s3://bucket/ckpt/step_5.pt")
    result = smpkit("stop", "job", "--wait", code=0)
    assert "newest checkpoint: s3://bucket/ckpt/step_5.pt" in result.stderr
    assert "hint: `smpkit resume job` goes on from there" in result.stderr
    assert "`job` is over already: Stopped" in smpkit("stop", "job").stderr


def test_resume_starts_a_job_from_the_checkpoints(use: Use, smpkit: Smpkit) -> None:
    aws = use(ago=0)
    dry = json.loads(smpkit("resume", "job", "--dry-run", "--json", "--name", "again", "--instance-count", "4").stdout)
    assert "again" not in aws.jobs
    result = smpkit("resume", "job", "--name", "again", "--instance-count", "4")
    assert result.stdout == "again\n"
    assert without_token(aws.jobs["again"].request) == without_token(dry)
    assert dry["ResourceConfig"]["InstanceCount"] == 4
    smpkit("resume", "job", "--instance-type", "ml.none", code=2)


def test_doctor_says_what_to_do(use: Use, smpkit: Smpkit) -> None:
    aws = use()
    aws.fail("GetCallerIdentity", "ExpiredToken", "x")
    result = smpkit("doctor", "job.yaml", code=1)
    assert "✗ cannot tell whose AWS credentials these are: the AWS credentials have expired\n    hint:" in result.stdout
    assert result.stderr == "1 problem\n"


@pytest.fixture
def named(use: Use) -> Aws:
    """An account that has what the job names."""
    trust = '{"Statement": [{"Principal": {"Service": "sagemaker.amazonaws.com"}}]}'
    SESSION.client("iam").create_role(RoleName="SM", AssumeRolePolicyDocument=trust)
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    ecr = SESSION.client("ecr")
    ecr.create_repository(repositoryName="smpkit")
    ecr.put_image(repositoryName="smpkit", imageTag="latest", imageManifest=json.dumps(manifest))
    return use()


def test_doctor_looks_at_everything_the_job_names(named: Aws, smpkit: Smpkit) -> None:
    good = smpkit("doctor", "job.yaml", "--write", code=0)
    assert good.stderr == "no problems\n"
    assert [line[:12] for line in good.stdout.splitlines()][-4:] == [
        *("✓ credential", "✓ role: arn:", "✓ wrote to a", "✓ image: 123"),
    ]
    assert not named.objects()
    SESSION.client("iam").delete_role(RoleName="SM")
    SESSION.client("iam").create_role(RoleName="SM", AssumeRolePolicyDocument='{"Service": "ec2.amazonaws.com"}')
    distrusted = smpkit("doctor", "job.yaml").stdout
    assert "✗ role `SM` does not trust SageMaker\n    hint: add `sagemaker.amazonaws.com`" in distrusted
    changes = {"role": "arn:aws:iam::123456789012:role/Other", "output": "s3://other/out"}
    Path("job.yaml").write_text(yaml.safe_dump(yaml.safe_load(JOB.replace(":latest", ":2")) | changes))
    bad = smpkit("doctor", "job.yaml", code=1)
    assert bad.stderr == "3 problems\n"
    assert "✗ cannot look at role `Other`" in bad.stdout
    assert "✗ cannot reach bucket s3://other" in bad.stdout
    assert "✗ cannot find image" in bad.stdout


def interrupted(*_: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["submit job.yaml", "resume job"])
def test_ctrl_c_while_a_job_is_started_tells_its_name(
    use: Use, smpkit: Smpkit, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request may have been taken; without its name the user could not stop what costs money."""
    use(ago=0)
    monkeypatch.setattr(SageMaker, "_start", interrupted)
    result = smpkit(*command.split(), "--name", "next", code=130)
    assert result.stdout == ""
    assert "`next` was being started, and may have been" in result.stderr
    assert "`smpkit stop next` stops it" in result.stderr


def test_ctrl_c_during_the_upload_says_that_no_job_was_started(
    use: Use, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws = use()
    monkeypatch.setattr(Cloud, "upload", interrupted)
    result = smpkit("submit", "job.yaml", "--name", "next", code=130)
    assert result.stdout == ""
    assert "`next` was not started" in result.stderr
    assert "may have been" not in result.stderr
    assert not aws.calls["CreateTrainingJob"]


@pytest.mark.parametrize(
    ("option", "around", "region"),
    [
        ("eu-west-1", {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-2"}, "eu-west-1"),
        (None, {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-2"}, "us-east-1"),
        (None, {"AWS_DEFAULT_REGION": "us-east-2"}, "us-east-2"),
    ],
)
def test_the_region_is_that_of_the_aws_cli(
    option: str | None, around: dict[str, str], region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 by itself does not read AWS_REGION, which is what containers, Lambda and the AWS CLI have."""
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert BackendChoice(region=option).open().title == f"SageMaker in {region}"


def test_an_endpoint_that_is_no_address_is_told(monkeypatch: pytest.MonkeyPatch, smpkit: Smpkit) -> None:
    for name, value in {"ENDPOINT_URL": "nowhere", "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    result = smpkit("jobs", "--region", "us-east-1", code=4)
    assert result.stdout == ""
    assert result.stderr.startswith("error: cannot use AWS: invalid endpoint: nowhere\nhint: AWS_ENDPOINT_URL")


def test_a_dry_run_needs_neither_region_nor_credentials_nor_a_role(
    here: Path, smpkit: Smpkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(here / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (here / "train.py").touch()

    def dry_run(*options: str) -> tuple[Any, str]:
        done = smpkit("submit", "job.yaml", "--dry-run", "--json", *options, code=0)
        return json.loads(done.stdout), done.stderr

    named = JOB.replace("output: s3://bucket/out\n", "").replace("arn:aws:iam::123456789012:role/", "")
    (here / "job.yaml").write_text(named)
    request, said = dry_run()
    assert request["OutputDataConfig"]["S3OutputPath"] == "s3://sagemaker-<region>-000000000000/"
    assert request["RoleArn"] == "arn:aws:iam::000000000000:role/SM"
    assert "note: no AWS region is set: `<region>` stands for it" in said
    request, said = dry_run("--region", "eu-west-1")
    assert request["OutputDataConfig"]["S3OutputPath"] == "s3://sagemaker-eu-west-1-000000000000/"
    assert "note: cannot tell whose AWS credentials these are" in said
    assert said.rstrip().endswith("`000000000000` stands for the account")
    smpkit("submit", "job.yaml", code=4)
    (here / "job.yaml").write_text(JOB.replace("role: arn:aws:iam::123456789012:role/SM\n", ""))
    request, said = dry_run("--region", "eu-west-1")
    assert request["RoleArn"] == "arn:aws:iam::000000000000:role/stand-in"
    assert "note: no role is set: `arn:aws:iam::000000000000:role/stand-in` stands for it" in said
    assert "role: is required for a managed job" in smpkit("submit", "job.yaml", code=2).stderr


@pytest.mark.parametrize("options", ["--backend batch", r"--profile 'my\own' --region eu-west-1"])
def test_commands_in_hints_find_the_same_cloud(use: Use, smpkit: Smpkit, options: str) -> None:
    """Pasted as printed, they said that no region is set."""
    aws = use(Script(failure=REASON))
    given, expected = shlex.split(options), f" {options}"
    said = smpkit("submit", "job.yaml", "--name", "job", *given).stderr
    assert f"Follow with `smpkit logs -f job{expected}`, stop with `smpkit stop job{expected}`" in said
    aws.clock.advance(1000)
    assert f"hint: `smpkit logs job --rank 5 --tail 50{expected}`\n" in smpkit("status", "job", *given).stderr
    said = smpkit("status", "none", *given).stderr
    assert f"`smpkit jobs{expected}` lists them; `--region` looks elsewhere" in said
    assert "`smpkit logs job --rank 5 --tail 50`\n" in smpkit("status", "job").stderr


def test_a_job_with_instance_groups_is_resumed_with_them(use: Use, smpkit: Smpkit) -> None:
    aws = use(ago=1000)
    groups = [{"InstanceGroupName": "train", "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2}]
    aws.jobs["job"].request["ResourceConfig"] = {"VolumeSizeInGB": 30, "InstanceGroups": groups}
    smpkit("resume", "job", "--name", "again", code=0)
    assert aws.jobs["again"].request["ResourceConfig"] == aws.jobs["job"].request["ResourceConfig"]
    refused = smpkit("resume", "job", "--instance-count", "4", code=2)
    assert refused.stdout == ""
    assert "`--instance-count` is for a job whose hosts are of one kind" in refused.stderr
