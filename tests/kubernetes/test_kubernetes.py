"""Jobs on Kubernetes: the official client against a fake API server that runs pods as processes of this machine."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from smpkit.testing import FakeKubernetes
from tests.job_contract import (
    OnCluster,
    a_job_that_fails,
    a_job_that_is_stopped_goes_on,
    a_job_that_succeeds,
    a_report_of_it,
    uninterrupted,
)
from tests.kubernetes.conftest import PIPELINE, User
from tests.slurm.test_slurm import FAILS, ODD, WAITS

VERSIONS = ("1.30", "1.34", "1.37")
"""Of the API, whose published schema manifests must fit, strictly."""


def manifests(user: User, *arguments: str) -> dict[str, dict[str, Any]]:
    text = user.run("submit", "job.yaml", "--dry-run", "--name", "job", *arguments).stdout
    assert "&id0" not in text
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def valid(found: Mapping[str, Any]) -> None:
    for manifest in found.values():
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


# ---- what is sent ------------------------------------------------------------------------------------------------


EVERYTHING: dict[str, Any] = {
    "namespace": "team",
    "workload": "job",
    "queue": "gpus",
    "priority_class": "high",
    "gpus": 8,
    "cpus": "96",
    "memory": "1000Gi",
    "resources": {"rdma/hca": "1"},
    "shared_memory": "64Gi",
    "node_selector": {"cloud/gpu": "h100"},
    "tolerations": [
        {"key": "nvidia.com/gpu"},
        {"key": "team", "operator": "Equal", "value": "a", "effect": "NoExecute"},
    ],
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "host_network": True,
    "grace_seconds": 300,
    "restarts": 5,
    "keep_seconds": 86400,
    "labels": {"cost": "a1"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "volumes": [
        {"mount": "/data", "claim": "tokens", "read_only": True},
        {"mount": "/nfs", "nfs": "server:/export"},
        {"mount": "/fast", "source": {"csi": {"driver": "fast.example.com"}}},
        {"mount": "/shared", "host_path": "/lustre"},
    ],
}


def test_manifests_with_every_option_fit_the_published_schema(user: User) -> None:
    user.write(
        kubernetes=EVERYTHING,
        inputs={"train": "/data/c4"},
        output="/shared/out",
        checkpoints="/nfs/checkpoints",
        compute={"instance_count": 4, "max_run_seconds": 3600},
    )
    found = manifests(user)
    valid(found)
    assert sorted(found) == ["ConfigMap", "Job", "Secret", "Service"]
    spec = found["Job"]["spec"]
    pod = spec["template"]["spec"]
    assert found["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert (spec["suspend"], spec["completions"], spec["parallelism"]) == (True, 4, 4)
    assert (spec["activeDeadlineSeconds"], spec["backoffLimitPerIndex"]) == (3600, 5)
    assert pod["terminationGracePeriodSeconds"] == 310
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pod["containers"][0]["command"] == ["python3", "-m", "smpkit_container", "host", "/etc/smpkit"]
    assert {"name": "SMPKIT_FIRST_HOST", "value": "job-0.job"} in pod["containers"][0]["env"]
    assert [volume["name"] for volume in pod["volumes"]][3:] == [f"volume-{index}" for index in range(4)]


def test_a_jobset_is_made_where_the_cluster_has_them(
    tmp_path: Path, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.write()
    assert "Job" in manifests(user)
    assert "JobSet" in manifests(user, "--set", "backend.kubernetes.workload=jobset")
    with FakeKubernetes(jobset=True) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path / "other")))
        found = manifests(user)
        assert sorted(found) == ["ConfigMap", "JobSet", "Secret"]
        template = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]
        valid({"Job": {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": template["spec"]}})
        assert {"name": "SMPKIT_FIRST_HOST", "value": "job-hosts-0-0.job"} in template["spec"]["template"]["spec"][
            "containers"
        ][0]["env"]
        assert "Job" in manifests(user, "--set", "backend.kubernetes.workload=job")


def test_without_a_cluster_a_dry_run_says_what_it_could_not_know(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write()
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    done = user.run("submit", "job.yaml", "--dry-run")
    assert "whether it has JobSets is not known" in done.stderr
    refused = user.run("submit", "job.yaml", code=4)
    assert "cannot use Kubernetes: " in refused.stderr
    assert "KUBECONFIG names the file" in refused.stderr


# ---- what a job is -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipeline_over_two_pods(user: User) -> None:
    """The run, from what the dry run shows to what is kept; losses are those of plain PyTorch in one process."""
    user.write(
        distribution=PIPELINE,
        hyperparameters={"steps": 6},
        secrets={"KEY": {"variable": "MY_KEY"}},
        environment={"API_TOKEN": "abcdefgh1234"},
    )
    os.environ["MY_KEY"] = "hush-hush"
    try:
        dry = json.loads(user.run("submit", "job.yaml", "--dry-run", "--json", "--name", "pipe").stdout)["manifests"]
        a_job_that_succeeds(user.run, "pipe", ("pod-0", "pod-1"))
    finally:
        del os.environ["MY_KEY"]
    created = [body for method, _, body in user.cluster.requests if method == "POST"]
    assert [hidden(each) for each in created] == [hidden(each) for each in dry]
    told, sent = (next(each["binaryData"] for each in made if "binaryData" in each) for made in (dry, created))
    digest = hashlib.sha256(base64.b64decode(sent["sourcedir.tar.gz"])).hexdigest()
    assert told["sourcedir.tar.gz"].endswith(f" bytes, sha256 {digest})")
    assert (user.shared / "out" / "pipe" / "model" / "losses.txt").read_text() == uninterrupted()
    a_report_of_it(user.run, "pipe")
    refused = user.run("report", "none", code=2)
    assert "there is no job `none`" in refused.stderr
    assert user.status("pipe")["model_data"] == str(user.shared / "out" / "pipe" / "model")
    lines = [json.loads(line) for line in user.run("logs", "pipe", "--rank", "1", "--json").stdout.splitlines()]
    assert next(line["text"] for line in lines if "step 6" in line["text"]).startswith("[rank 1] step 6 on pod-1: ")
    shown = json.dumps(dry) + user.told()
    assert "hush-hush" not in shown
    assert "abcdefgh1234" not in shown
    owned = [each for each in user.cluster.store.objects.values() if "ownerReferences" in each["metadata"]]
    assert {each["kind"] for each in owned} >= {"ConfigMap", "Secret", "Service", "Pod"}


def hidden(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without what the dry run does not show, or cannot know: secrets, the archive's bytes, the time."""
    found: dict[str, Any] = json.loads(json.dumps(manifest))
    found.pop("stringData", None)
    found.pop("binaryData", None)
    for name, text in found.pop("data", {}).items():
        found[name] = {**json.loads(text), "created": ""}
        found[name].get("environment", {}).pop("API_TOKEN", None)
    return found


def test_the_first_failing_rank_is_the_jobs_end(user: User) -> None:
    user.write(FAILS, hyperparameters={"text": ODD})
    a_job_that_fails(user.run, "fails", "ValueError: bad batch", "pod-1")
    assert {line.split()[0] for line in user.run("logs", "fails").stdout.splitlines()} == {"pod-0", "pod-1"}


def test_hyperparameters_arrive_as_they_are(user: User) -> None:
    user.write("import sys; print(sys.argv[1:])", quick=True, hosts=1, hyperparameters={"text": ODD})
    user.run("submit", "job.yaml", "--name", "odd", "--wait")
    assert repr(["--text", ODD]) in user.run("logs", "odd").stdout
    [packed] = user.cluster.store.get("ConfigMap", "team", "odd")["binaryData"].values()  # type: ignore[index]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        assert sorted(archive.getnames()) == ["job.yaml", "run.sh", "train.py"]


@pytest.mark.slow
def test_an_evicted_pod_goes_on_where_it_was(user: User) -> None:
    """SIGTERM to one host: all save, and all are started again, on a new node."""
    user.write(distribution=PIPELINE, hyperparameters={"steps": 6, "seconds": 0.3})
    user.run("submit", "job.yaml", "--name", "moved")
    user.until_logged("moved", "step 2 on")
    user.cluster.evict(user.cluster.pods("moved")[1])
    user.run("wait", "moved")
    assert "resumed at step" in user.told()
    assert user.status("moved")["interruptions"] == 1
    assert (user.shared / "out" / "moved" / "model" / "losses.txt").read_text() == uninterrupted()
    log = user.run("logs", "moved")
    assert "resumed at step" in log.stdout


@contextlib.contextmanager
def silent(port: int) -> Iterator[None]:
    """Drop what goes to and from a port of this machine, as when a node loses its power."""
    rules = [["INPUT", "-i", "lo", "-p", "tcp", end, str(port), "-j", "DROP"] for end in ("--sport", "--dport")]
    try:
        for rule in rules:
            subprocess.run(["iptables", "-A", *rule], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no packets can be dropped here: {error}")
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run(["iptables", "-D", *rule], check=True, capture_output=True)


@pytest.mark.slow
def test_a_lost_pod_lets_the_others_start_again(user: User) -> None:
    """No word at all: the launcher that is left ends with 75, which the failure policy takes as worth a try."""
    user.write(WAITS)
    user.run("submit", "job.yaml", "--name", "lost")
    user.until(lambda: user.told().count("ready") == 2, "both ranks")
    run = user.cluster.controller.runs[user.cluster.pods("lost")[1]]
    run.disrupted = True  # the node is gone: Kubernetes says so of its pods
    with silent(user.port + 1):
        run.kill()
        user.until(lambda: "the host was lost: it fell silent" in user.told(), "the other host to notice")
    user.until(lambda: user.told().count("ready") == 4, "both ranks again")
    user.run("stop", "lost", "--wait")
    assert user.status("lost")["status"] == "Stopped"


def test_a_killed_launcher_is_the_jobs_end(user: User) -> None:
    """The others hear it at once, and end; nobody waits for a host that will not come again."""
    user.write(WAITS)
    user.run("submit", "job.yaml", "--name", "killed")
    user.until(lambda: user.told().count("ready") == 2, "both ranks")
    os.kill(user.cluster.controller.runs[user.cluster.pods("killed")[1]].process.pid, signal.SIGKILL)
    user.run("wait", "killed", code=1)
    failure = user.status("killed")["failure"]
    assert failure["headline"] == "the container ended with exit code 137"
    assert "on pod-1" in failure["details"]
    assert "pod-1: the host was lost: its launcher was killed" in user.run("logs", "killed", "--host", "pod-0").stdout
    assert user.cluster.pods("killed") == sorted(user.cluster.controller.runs)


@pytest.mark.slow
def test_stop_gives_ranks_time_to_save_and_resume_goes_on(user: User) -> None:
    a_job_that_is_stopped_goes_on(
        OnCluster(user, lambda name: (user.shared / "out" / name / "model" / "losses.txt").read_text())
    )
    assert "Kubernetes deletes the pods of a stopped job" in user.run("logs", "old").stderr
    refused = user.run("resume", "old", "--instance-type", "ml.x", code=2)
    assert "`--instance-type` is not for Kubernetes" in refused.stderr
    states = {item["name"]: item["status"] for item in json.loads(user.run("jobs", "--json").stdout)}
    assert states == {"old": "Stopped", "new": "Completed"}


@pytest.mark.slow
def test_the_time_limit_gives_ranks_time_to_save(user: User) -> None:
    user.write(WAITS, hosts=None, compute={"instance_count": 1, "max_run_seconds": 40})
    user.run("submit", "job.yaml", "--name", "limited")
    user.run("wait", "limited", code=1)
    assert user.status("limited")["phase"] == "MaxRuntimeExceeded"
    assert "saved" in user.told()


def test_a_job_waits_in_kueues_queue(user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeKubernetes(jobset=True, kueue=True) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path / "other")))
        user.write("print('ran')", quick=True, hosts=1, kubernetes={"queue": "gpus"})
        for name in ("waits", "runs"):
            user.run("submit", "job.yaml", "--name", name)
            assert (user.status(name)["status"], user.status(name)["phase"]) == ("InProgress", "Pending")
        user.run("stop", "waits", "--wait")
        assert user.status("waits")["status"] == "Stopped"
        cluster.admit("runs")
        user.run("wait", "runs")
        assert "ran" in user.run("logs", "runs").stdout
        assert not cluster.pods("waits")


@pytest.mark.slow
def test_a_log_is_followed_whole(user: User) -> None:
    """Every line once, though parts are read again: each poll asks for a minute more than is new."""
    user.write(
        "import os, time\nfor n in range(20_000):\n    print('line', os.environ['RANK'], n)\n"
        "    if n % 5000 == 0: time.sleep(1)"
    )
    done = user.run("submit", "job.yaml", "--name", "long", "--follow")
    for rank in range(2):
        numbers = re.findall(rf"\[rank {rank}\] line {rank} (\d+)$", done.stdout, re.MULTILINE)
        assert [int(number) for number in numbers] == list(range(20_000))
    tail = user.run("logs", "long", "--rank", "1", "--tail", "2").stdout.splitlines()
    assert tail == [f"pod-1 [rank 1] line 1 {number}" for number in (19_998, 19_999)]


# ---- what is refused, and what is looked at ----------------------------------------------------------------------


def test_what_kubernetes_cannot_do_is_refused_by_name(user: User) -> None:
    user.write("", image=None, output="s3://bucket/out", checkpoints="/elsewhere")
    refused = user.run("submit", "job.yaml", "--name", "Upper", code=2).stderr
    for words in (
        "name: makes the name `Upper`",
        "image: is required on Kubernetes",
        "output: is no folder that containers see",
        "checkpoints.uri: lies in no volume of the containers",
    ):
        assert words in refused
    user.write("", kubernetes={"volumes": [{"mount": "/opt/ml", "claim": "a", "nfs": "server"}]})
    refused = user.run("submit", "job.yaml", code=2).stderr
    for words in ("has claim and nfs", "must be `server:/path`"):
        assert words in refused
    assert not user.cluster.store.objects


def test_commands_find_a_job_in_another_namespace(user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig = json.loads((tmp_path / "kubeconfig").read_text())
    kubeconfig["contexts"][0]["context"]["namespace"] = "mine"
    (tmp_path / "mine").write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "mine"))
    user.write("", quick=True, hosts=1, kubernetes={"namespace": "team"})
    sent = user.run("submit", "job.yaml", "--name", "there", "--wait")
    assert "--region" not in sent.stderr
    assert user.status("there")["arn"] == "kubernetes:team/there"
    user.run("logs", "there")
    assert (
        "there is no job `there` in namespace `mine`" in user.run("status", "there", "--region", "mine", code=2).stderr
    )
    user.cluster.forbidden.add("list jobs everywhere")
    assert "in namespace `mine`" in user.run("status", "there", code=2).stderr
    dry = user.run("submit", "job.yaml", "--dry-run")
    assert "later commands find the job with `--region team`" in dry.stderr


def test_sources_that_are_too_large_are_named_with_what_to_do(user: User) -> None:
    user.write("")
    (user.folder / "large.bin").write_bytes(os.urandom(2**20))
    refused = user.run("submit", "job.yaml", code=2).stderr
    assert "source_dir: makes 1,0" in refused
    assert "most are the packed sources" in refused
    assert "`backend.kubernetes.code`" in refused
    assert "ConfigMap" in manifests(user, "--set", f"backend.kubernetes.code={user.shared}")


@pytest.mark.slow
def test_sources_may_lie_in_a_volume(user: User) -> None:
    (user.shared / "src").mkdir()
    (user.shared / "src" / "train.py").write_text("print('from the volume')")
    user.write("", hosts=1, kubernetes={"code": str(user.shared / "src")})
    user.run("submit", "job.yaml", "--name", "there", "--wait")
    assert "from the volume" in user.run("logs", "there").stdout


def test_a_job_that_is_refused_leaves_nothing(user: User) -> None:
    user.write("")
    user.cluster.forbidden.add("create jobs")
    refused = user.run("submit", "job.yaml", "--name", "refused", code=4)
    assert "cannot create the Job `refused`: jobs is forbidden" in refused.stderr
    assert "a Role in the namespace `team` must allow it" in refused.stderr
    assert not user.cluster.store.objects
    assert "there is no job `refused` in namespace `team`" in user.run("status", "refused", code=2).stderr


def test_a_lost_answer_starts_no_second_job(user: User) -> None:
    user.write("print('once')", quick=True, hosts=1)
    user.cluster.lost_answers.add("create jobs")
    user.run("submit", "job.yaml", "--name", "once", "--wait")
    assert len(user.cluster.controller.runs) == 1
    again = user.run("submit", "job.yaml", "--name", "once", code=4)
    assert "already exists" in again.stderr
    assert user.status("once")["status"] == "Completed"
    assert user.cluster.store.get("Secret", "team", "once") is not None


def test_a_token_that_is_not_known_is_said(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.cluster.token = "another"
    assert "the cluster does not know these credentials" in user.run("jobs", code=4).stderr
    user.cluster.close()
    monkeypatch.setattr("urllib3.util.retry.Retry.DEFAULT_BACKOFF_MAX", 0)
    assert "did not answer" in user.run("jobs", code=4).stderr


def test_doctor_looks_at_the_cluster(user: User) -> None:
    user.write("", kubernetes={"queue": "gpus", "volumes": [{"mount": "/data", "claim": "tokens"}]}, output="/data/out")
    user.cluster.forbidden.add("create secrets")
    claim = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "tokens"},
        "spec": {"accessModes": ["ReadWriteOnce"]},
    }
    user.cluster.store.add(claim, "team")
    findings = {
        item["what"]: item for item in json.loads(user.run("doctor", "job.yaml", "--write", "--json", code=1).stdout)
    }
    assert findings["kubernetes"]["text"].startswith("Kubernetes v1.34.0 at http://127.0.0.1:")
    assert findings["rights"]["text"] == "this identity may not: create secrets"
    assert findings["queue"]["text"].startswith("the cluster has no Kueue")
    assert findings["volume"]["text"].startswith("claim `tokens` is ReadWriteOnce")
    assert findings["workload"]["text"] == "jobs become an Indexed Job"
    assert findings["write"]["state"] == "ok"
    assert [kind for kind, _, _ in user.cluster.store.objects] == ["PersistentVolumeClaim"]
