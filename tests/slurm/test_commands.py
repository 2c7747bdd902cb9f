"""What Slurm's commands print, and what they get."""

from __future__ import annotations

import errno
import json
import os
import shlex
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from smpkit.config.job import JobConfig
from smpkit.errors import CloudError, UnreachableError
from smpkit_estimator.backend import Query
from smpkit_estimator.scheduled import not_for_schedulers
from smpkit_estimator.slurm.backend import SlurmCluster
from smpkit_estimator.slurm.state import Record, accounted, ask, records
from tests.job_contract import in_this_process as run

TIME = 1_700_000_000
MOMENT = datetime.fromtimestamp(TIME, timezone.utc)


MOMENT_TEXT = f"{MOMENT:%Y-%m-%dT%H:%M:%S}"
ROW = f"12   |RUNNING  |{MOMENT_TEXT}  |{MOMENT_TEXT}  |N/A   |n[1-2]  |gpu  |2  |None  |1  |\n"


def slurm(folder: Path, name: str, does: str) -> None:
    """Put a shell script in the place of one of Slurm's commands."""
    (folder / name).write_text(f"#!/bin/sh\n{does}\n")
    (folder / name).chmod(0o755)


def command(folder: Path, name: str, prints: str, code: int = 0, error: str = "") -> None:
    """Put a command in Slurm's place that prints something."""
    (folder / "out").write_text(prints)
    (folder / "err").write_text(error)
    slurm(folder, name, f'echo "$@" > {folder}/asked; cat {folder}/out; cat {folder}/err >&2; exit {code}')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_row_of_the_queue_is_read_in_utc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    command(folder, "squeue", ROW)
    assert records(["12"]) == {"12": Record("12", "RUNNING", "None", MOMENT, MOMENT, None, 1, "n[1-2]", "gpu", 2)}
    slurm(folder, "squeue", "echo $TZ >&2; exit 1")
    with pytest.raises(CloudError, match="UTC"):
        records()


def test_a_job_gets_the_variables_of_its_user_and_none_of_a_job_that_submits_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun` refuses `SLURM_MEM_PER_CPU` of the one job beside the memory of the other."""
    own = {"LC_ALL": "de_DE.UTF-8", "TZ": "Europe/Berlin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab"}
    for name, value in {**own, "SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "100", "SRUN_DEBUG": "3"}.items():
        monkeypatch.setenv(name, value)
    slurm(folder, "sbatch", "env")
    sent = dict(line.split("=", 1) for line in ask("sbatch", doing="").splitlines())
    assert {name: sent.get(name) for name in own} == own
    assert not {"SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SRUN_DEBUG"} & sent.keys()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert "SLURM_MEM_PER_CPU=100" in ask("sbatch", doing="").splitlines()


def test_no_answer_is_said(folder: Path) -> None:
    command(folder, "squeue", "", 1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(UnreachableError, match="Unable to contact slurm controller"):
        records()
    command(folder, "squeue", "", 1, "slurm_load_jobs error: Invalid job id specified")
    assert records(["12"]) == {}


def test_the_accounting_database_tells_of_jobs_that_the_controller_forgot(folder: Path) -> None:
    line = "12|CANCELLED by 0|2026-01-01T00:00:00|2026-01-01T00:00:05|2026-01-01T00:01:00|n[1-2]|gpu|2\n"
    command(folder, "sacct", line)
    found = accounted("12")
    assert found is not None
    assert (found.state, found.nodes, found.node_count) == ("CANCELLED", "n[1-2]", 2)
    begun = datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert (found.started, found.ended) == (begun + timedelta(seconds=5), begun + timedelta(seconds=60))
    command(folder, "sacct", "", 1, "Slurm accounting storage is disabled")
    assert accounted("12") is None


@pytest.mark.parametrize(
    ("slurm", "wanted"),
    [
        ({"gpus_per_node": "a100:8", "container": "pyxis"}, ["#SBATCH --gpus-per-node=a100:8"]),
        ({"gres": "gpu:8", "container": "pyxis", "qos": "high", "account": "team"}, ["#SBATCH --gres=gpu:8"]),
        ({"container": "apptainer", "memory": "64G"}, ["#SBATCH --mem=64G"]),
        ({"container": "apptainer", "exclusive": True}, ["#SBATCH --exclusive"]),
        ({"container": "apptainer", "exclusive": True, "cpus_per_node": 4}, ["#SBATCH --cpus-per-task=4"]),
    ],
    ids=["gpus", "gres", "memory", "all CPUs", "some CPUs"],
)
def test_the_script_has_the_options_of_the_job_file(folder: Path, slurm: dict[str, Any], wanted: list[str]) -> None:
    """No Slurm is needed for a dry run; GPUs are left to the launcher, which gives each rank one."""
    (folder / "train.py").touch()
    job = {
        "entry_point": "train.py",
        "image": "registry.io/team/smpkit:1",
        "compute": {"instance_count": 2},
        "distribution": {"torch_distributed": {"enabled": True, "processes_per_host": 2}},
        "backend": {"slurm": {"mounts": ["/data"], **slurm}},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    done = run("submit", str(folder / "job.yaml"), "--dry-run", "--json")
    lines = json.loads(done.stdout)["script"].splitlines()
    wanted += [f"#SBATCH --{name}={slurm[name]}" for name in ("qos", "account") if name in slurm]
    assert set(wanted) <= set(lines)
    [started] = [shlex.split(line) for line in lines if line.startswith("srun ")]
    assert not [word for word in started if word.startswith("--gpu")]
    # A step has no more CPUs than `srun` asks for, of an exclusive node, too.
    cpus = slurm.get("cpus_per_node", None if "exclusive" in slurm else 2)
    assert [word for word in started if word.startswith("--cpus")] == ([f"--cpus-per-task={cpus}"] if cpus else [])
    if slurm["container"] == "pyxis":
        assert "--container-image=registry.io#team/smpkit:1" in started
        [mounts] = [word for word in started if word.startswith("--container-mounts=")]
        assert mounts.endswith(",/data:/data")
    else:
        at = started.index("apptainer")
        assert started[at : at + 2] == ["apptainer", "exec"]
        assert started[started.index("docker://registry.io/team/smpkit:1") + 1] == "python3"


@pytest.mark.parametrize("kept", ["{}", '{"created": 5, "job": {}}', '{"created": "then", "job": {}}', '{"created": "'])
def test_a_folder_of_something_else_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    runs = folder / "my runs"
    monkeypatch.setenv("SMPKIT_RUNS", str(runs))
    whole = json.dumps({"created": MOMENT.isoformat(), "job": {}})
    for name, text in (("job", whole), ("other", kept)):
        (runs / name / "logs").mkdir(parents=True)
        (runs / name / "job.json").write_text(text)
        (runs / name / "slurm.json").write_text("{}")
        (runs / name / "ended").write_text(f"0 0 {TIME} {TIME + 60}\n")
    (runs / "job" / "logs" / "0-1.log").write_text("hello\n")  # without `0.hosts`
    command(folder, "squeue", "")
    cluster = SlurmCluster()
    assert {job.name: job.status for job in cluster.list(Query())} == {"job": "Completed", "other": "Unknown"}
    assert [(line.host, line.text) for line in next(cluster.log("job"))] == [("0-1", "hello")]
    with pytest.raises(CloudError, match=r"other/job\.json is damaged") as caught:
        cluster.describe("other")
    assert caught.value.hint == f"`rm -r '{runs / 'other'}'` forgets the job"


def test_how_a_forgotten_job_ended_is_what_its_batch_script_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMPKIT_RUNS", str(folder / "runs"))
    place = folder / "runs" / "job"
    for part in ("model", "nodes/n1/output", "nodes/n2/output"):
        (place / part).mkdir(parents=True)
    (place / "job.json").write_text(json.dumps({"created": MOMENT.isoformat(), "job": {}}))
    (place / "slurm.json").write_text('{"id": "12"}')
    command(folder, "squeue", "")
    command(folder, "sacct", "", 1, "Slurm accounting storage is disabled")
    cluster = SlurmCluster()
    with pytest.raises(CloudError, match=r"no longer knows job `job` \(12\), and its batch script left no end"):
        cluster.describe("job")
    (place / "ended").write_text(f"1 2 {TIME} {TIME + 60}\n")
    (place / "slurm.json").unlink()  # the command that submitted it was killed
    (place / "nodes" / "n1" / "output" / "failure").touch()  # the disk was full
    status = cluster.describe("job")
    assert (status.status, status.failure and status.failure.headline) == ("Failed", "Slurm says FAILED")
    command(folder, "squeue", "", 1, "slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(UnreachableError):
        cluster.describe("job")
    command(folder, "squeue", "")
    command(folder, "sacct", "", 1, "Slurm accounting storage is disabled")
    (place / "slurm.json").write_text('{"id": "12"}')
    for first, other in (("n1", "n2"), ("n2", "n1")):
        for seconds, node in enumerate((first, other)):
            failure = place / "nodes" / node / "output" / "failure"
            failure.write_text(f"ValueError: x\nrank 1 on {node}, exit 1")
            os.utime(failure, (TIME + seconds, TIME + seconds))
        status = cluster.describe("job")
        assert (status.status, status.training_seconds, status.interruptions) == ("Failed", 60, 2)
        assert (status.failure and status.failure.host) == first
    (folder / "asked").unlink()
    (folder / "sacct").unlink()
    assert [job.status for job in cluster.list(Query())] == ["Failed"]
    assert "--me" in (folder / "asked").read_text()  # the one command: none for each run


def sent(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[str]:
    """Write a job file and put a Slurm in its place that takes every job; return the command that submits it."""
    monkeypatch.setenv("SMPKIT_RUNS", str(folder / "runs"))
    for name, does in {"scontrol": "printf 'ClusterName = c\nKillWait = 30 sec\n'", "sbatch": "echo 12"}.items():
        slurm(folder, name, does)
    source = folder / "source"
    source.mkdir()
    (source / "train.py").touch()
    (source / "job.yaml").write_text(yaml.safe_dump({"entry_point": "train.py", "backend": "slurm", **settings}))
    return ["submit", str(source / "job.yaml")]


def test_a_user_without_a_home_folder_is_told_what_to_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("SMPKIT_RUNS", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 3)
    done = run("jobs", "--backend", "slurm", code=2)
    assert "this user has no home folder\nhint: set SMPKIT_RUNS to a folder" in done.output


def test_sources_in_s3_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(*sent(folder, monkeypatch, source_dir="s3://bucket/code.tar.gz"), code=2)
    assert "source_dir: is in S3, which the hosts do not read" in done.output


def test_a_lost_answer_starts_no_second_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, runs = [*sent(folder, monkeypatch), "--name"], folder / "runs"
    slurm(folder, "sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    slurm(folder, "squeue", "echo 12")
    run(*submit, "found")
    assert json.loads((runs / "found" / "slurm.json").read_text()) == {"id": "12"}
    slurm(folder, "squeue", "")
    assert "it may have been started all the same" in run(*submit, "lost", code=4).output
    assert (runs / "lost" / "script.sh").is_file()  # which the job needs, if it runs


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        (KeyboardInterrupt(), "`other` was not started", 130),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left on device", 4),
    ],
    ids=["Ctrl-C", "full disk"],
)
def test_of_a_job_that_was_not_sent_nothing_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: str, code: int
) -> None:
    submit, runs = sent(folder, monkeypatch, backend={"slurm": {"folder": str(folder / "scratch")}}), folder / "runs"
    run(*submit, "--name", "job")

    def fail(source: Path, target: Path) -> None:
        target.write_bytes(b"half of it")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", fail)
        assert told in run(*submit, "--name", "other", code=code).output
    assert [path.name for place in (runs, folder / "scratch") for path in place.iterdir()] == ["job", "job"]
    assert "there is a job `job` already" in run(*submit, "--name", "job", code=2).output
    assert (runs / "job" / "code" / "train.py").is_file()


def test_secrets_are_for_the_hosts_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hush-hush")
    submit = sent(folder, monkeypatch, secrets={"KEY": {"variable": "MY_KEY"}})
    login = ["--set", "backend={slurm: {setup: [export HF_TOKEN=hush-hush]}}"]
    shown = run(*submit, *login, "--dry-run").output
    assert '"KEY"' in shown
    assert "export HF_TOKEN=*********\n" in shown
    assert "hush-hush" not in shown
    run(*submit, "--name", "job")
    files = [path for path in (folder / "runs").rglob("*") if path.is_file() and "hush-hush" in path.read_text()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in files] == [("variables.json", 0o600)]


def test_ranks_have_time_to_save_and_are_started_with_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = sent(folder, monkeypatch, distribution={"mpi": {"enabled": True, "processes_per_host": 2}})
    shown = json.loads(run(*submit, "--dry-run", "--json").stdout)
    assert shown["variables"]["SMPKIT_GRACE_SECONDS"] == "25"  # before Slurm kills them
    assert not [name for name in shown["hyperparameters"] if "_mpi_" in name]
    own = run(*submit, "--set", "environment.SMPKIT_GRACE_SECONDS=7", "--dry-run", "--json").stdout
    assert json.loads(own)["variables"]["SMPKIT_GRACE_SECONDS"] == "7"


@pytest.mark.parametrize(("code", "asked"), [(0, True), (143, False)], ids=["smpkit stop", "scancel"])
def test_a_job_that_was_stopped_neither_completed_nor_failed(
    folder: Path, code: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*sent(folder, monkeypatch), "--name", "job")
    (folder / "runs" / "job" / "ended").write_text(f"{code} 0 {TIME} {TIME + 60}\n")
    if asked:
        (folder / "runs" / "job" / "stopped").touch()
    slurm(folder, "squeue", "")
    slurm(folder, "sacct", "exit 1")
    assert SlurmCluster().describe("job").status == "Stopped"


def test_a_name_with_other_characters_is_told_apart_from_one_that_is_too_long() -> None:
    job = JobConfig(entry_point="train.py")
    hints = [each.hint for name in ("My Job!", "x" * 64) for each in not_for_schedulers(job, name)]
    assert hints == ["for example `My-Job`", "shorten it"]
