"""Jobs on Kubernetes: manifests against the published schema; pods that are launchers of this machine, behind `Api`."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import tarfile
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import kubernetes_validate
import pytest
import yaml

from smpkit.errors import CloudError, UnreachableError
from smpkit_estimator.kubernetes import api, backend
from tests.job_contract import (
    PIPELINE,
    OnCluster,
    a_job_that_fails,
    a_job_that_is_stopped_goes_on,
    a_job_that_succeeds,
    a_long_log_is_followed_whole,
    a_report_of_it,
    uninterrupted,
)
from tests.kubernetes.api import Cluster
from tests.kubernetes.conftest import User
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
    assert pod["containers"][0]["command"] == ["python3", "-P", "-m", "smpkit_container", "train"]
    places = next(json.loads(each["value"]) for each in pod["containers"][0]["env"] if each["name"] == "SMPKIT_PLACES")
    assert places["checkpoints"] == "/nfs/checkpoints"
    assert places["input/data/train"] == "/data/c4"
    assert {"name": "SMPKIT_FIRST_HOST", "value": "job-0.job"} in pod["containers"][0]["env"]
    assert [volume["name"] for volume in pod["volumes"]][3:] == [f"volume-{index}" for index in range(4)]


def test_without_a_cluster_a_dry_run_says_what_it_could_not_know(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write()
    monkeypatch.setattr(backend, "connect", api.connect)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    done = user.run("submit", "job.yaml", "--dry-run")
    assert "the namespace may be another" in done.stderr
    known = user.run("submit", "job.yaml", "--dry-run", "--region", "mine")
    assert "the namespace may be another" not in known.stderr
    assert "namespace: mine\n" in known.stdout
    refused = user.run("submit", "job.yaml", code=4)
    assert "cannot use Kubernetes: " in refused.stderr
    assert "KUBECONFIG names the file" in refused.stderr


def test_a_user_without_a_home_folder_has_no_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 3)
    with pytest.raises(CloudError, match="no configuration found"):
        api.connect(None, None)


# ---- what a job is -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipeline_over_two_pods(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run, from what the dry run shows to what is kept; losses are those of plain PyTorch in one process."""
    user.write(
        distribution=PIPELINE,
        hyperparameters={"steps": 6},
        secrets={"KEY": {"variable": "MY_KEY"}},
        environment={"API_TOKEN": "abcdefgh1234"},
    )
    monkeypatch.setenv("MY_KEY", "hush-hush")
    dry = json.loads(user.run("submit", "job.yaml", "--dry-run", "--json", "--name", "pipe").stdout)["manifests"]
    a_job_that_succeeds(user.run, "pipe", ("pod-0", "pod-1"))
    created = list(user.cluster.objects.values())
    assert [hidden(each) for each in created] == [hidden(each) for each in dry]
    told, sent = (next(each["binaryData"] for each in made if "binaryData" in each) for made in (dry, created))
    digest = hashlib.sha256(base64.b64decode(sent["sourcedir.tar.gz"])).hexdigest()
    assert told["sourcedir.tar.gz"].endswith(f" bytes, sha256 {digest})")
    assert (user.shared / "out" / "pipe" / "model" / "losses.txt").read_text() == uninterrupted()
    a_report_of_it(user.run, "pipe")
    assert "there is no job `none`" in user.run("report", "none", code=2).stderr
    assert user.status("pipe")["model_data"] == str(user.shared / "out" / "pipe" / "model")
    lines = [json.loads(line) for line in user.run("logs", "pipe", "--rank", "1", "--json").stdout.splitlines()]
    assert next(line["text"] for line in lines if "step 6" in line["text"]).startswith("[rank 1] step 6 on pod-1: ")
    shown = json.dumps(dry) + user.told()
    assert "hush-hush" not in shown
    assert "abcdefgh1234" not in shown
    [uid] = {each["metadata"]["uid"] for each in created if each["kind"] == "Job"}
    owners = [each["metadata"].get("ownerReferences", [{}])[0].get("uid") for each in created]
    assert owners == [None, uid, uid, uid]


def hidden(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without what the dry run does not show, or cannot know: secrets, owners, the archive's bytes."""
    unknown = ("ownerReferences", "uid", "creationTimestamp", "annotations")
    found: dict[str, Any] = json.loads(json.dumps(manifest))
    found["metadata"] = {key: value for key, value in found["metadata"].items() if key not in unknown}
    found = {key: value for key, value in found.items() if key not in ("stringData", "binaryData")}
    if found["kind"] == "Secret":
        found.pop("data", None)
    if found["kind"] == "ConfigMap":
        found["data"] = {name: json.loads(text) for name, text in found["data"].items()}
        found["data"]["job.json"].pop("environment", None)
    if found["kind"] == "Job":
        [container] = found["spec"]["template"]["spec"]["containers"]
        container["env"] = [each for each in container["env"] if each["name"] != "API_TOKEN"]
    return found


def test_the_first_failing_rank_is_the_jobs_end(user: User) -> None:
    user.write(FAILS, hyperparameters={"text": ODD})
    a_job_that_fails(user.run, "fails", "ValueError: bad batch", "pod-1")
    assert {line.split()[0] for line in user.run("logs", "fails").stdout.splitlines()} == {"pod-0", "pod-1"}


def test_hyperparameters_and_variables_arrive_as_they_are(user: User) -> None:
    """The plan hides the value of the variable, and must not hide it in what is sent."""
    script = "import os, sys; print(sys.argv[1:], os.environ['API_TOKEN'])"
    token = {"API_TOKEN": "abcdefgh1234"}
    user.write(script, quick=True, hosts=1, hyperparameters={"text": ODD}, environment=token)
    user.run("submit", "job.yaml", "--name", "odd", "--wait")
    assert f"{['--text', ODD]} abcdefgh1234" in user.run("logs", "odd").stdout
    [packed] = user.cluster.objects["ConfigMap", "odd"]["binaryData"].values()
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        assert sorted(archive.getnames()) == ["job.yaml", "run.sh", "train.py"]


def test_a_killed_launcher_is_the_jobs_end(user: User) -> None:
    """The others hear it at once, and end; nobody waits for a host that will not come again."""
    user.write(WAITS)
    user.run("submit", "job.yaml", "--name", "killed")
    user.until(lambda: user.told().count("ready") == 2, "both ranks")
    user.pods("killed")[1].process.send_signal(signal.SIGKILL)
    user.run("status", "killed", "--watch", code=1)
    failure = user.status("killed")["failure"]
    assert failure["headline"] == "the container ended with exit code 137"
    assert "on pod-1" in failure["details"]
    assert "pod-1: the host was lost: its launcher was killed" in user.run("logs", "killed", "--host", "pod-0").stdout


@pytest.mark.slow
def test_stop_gives_ranks_time_to_save_and_resume_goes_on(user: User) -> None:
    a_job_that_is_stopped_goes_on(
        OnCluster(user, lambda name: (user.shared / "out" / name / "model" / "losses.txt").read_text())
    )
    assert "Kubernetes deletes the pods of a stopped job" in user.run("logs", "old").stderr
    refused = user.run("resume", "old", "--instance-type", "ml.x", code=2).stderr
    assert "`--instance-type` is not for Kubernetes" in refused
    states = {item["name"]: item["status"] for item in json.loads(user.run("jobs", "--json").stdout)}
    assert states == {"old": "Stopped", "new": "Completed"}


def test_a_job_waits_in_a_queue_and_is_taken_out_of_it(user: User) -> None:
    user.write("print('ran')", quick=True, hosts=1, kubernetes={"queue": "gpus"})
    user.run("submit", "job.yaml", "--name", "waits")
    assert (user.status("waits")["status"], user.status("waits")["phase"]) == ("InProgress", "Pending")
    user.run("stop", "waits", "--wait")
    assert user.status("waits")["status"] == "Stopped"
    assert not user.pods("waits")


@pytest.mark.slow
def test_a_log_is_followed_whole(user: User) -> None:
    """Every line once, though parts are read again: each poll asks for a minute more than is new."""
    user.write(
        "import os, time\nfor n in range(20_000):\n    print('line', os.environ['RANK'], n)\n"
        "    if n % 5000 == 0: time.sleep(1)"
    )
    a_long_log_is_followed_whole(user.run, "pod-1", 20_000)


def test_who_may_not_read_secrets_resumes_a_job_without_any(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    read = user.cluster.read

    def only_others(kind: str, name: str) -> Mapping[str, Any] | None:
        if kind == "Secret":
            raise CloudError(f"cannot read the Secret `{name}`: forbidden")
        return read(kind, name)

    user.write("print('ran')", quick=True, hosts=1)
    user.run("submit", "job.yaml", "--name", "old", "--wait")
    monkeypatch.setattr(user.cluster, "read", only_others)
    user.run("resume", "old", "--name", "new", "--wait")
    assert user.status("new")["status"] == "Completed"


# ---- what is refused, and what is looked at ----------------------------------------------------------------------


def test_what_kubernetes_cannot_do_is_refused_by_name(user: User) -> None:
    def refused(*told: str, **job: Any) -> None:
        user.write("", **job)
        said = user.run("submit", "job.yaml", "--name", "Upper", code=2).stderr
        assert [words for words in told if words not in said] == []

    elsewhere: dict[str, Any] = {"image": None, "output": "s3://bucket/out", "checkpoints": "/elsewhere"}
    refused(
        *("name: makes the name `Upper`", "image: is required on Kubernetes"),
        *("output: is no folder that containers see", "checkpoints.uri: lies in no volume of the containers"),
        **elsewhere,
    )
    two_sources = [{"mount": "/opt/ml", "claim": "a", "nfs": "server:/a"}]
    refused("has claim and nfs", kubernetes={"volumes": two_sources})
    refused("source_dir: is in S3, which the hosts do not read", source_dir="s3://bucket/code.tar.gz")
    refused("workload: is always an Indexed Job", kubernetes={"workload": "jobset"})
    assert not user.cluster.objects


def test_back_end_and_namespace_of_the_job_file_stay_for_commands(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Mock(return_value=user.cluster)
    monkeypatch.setattr(backend, "connect", connect)
    monkeypatch.delenv("SMPKIT_BACKEND")  # the job file chooses it
    user.write("", quick=True, hosts=1, kubernetes={"namespace": "mine"})
    sent = user.run("submit", "job.yaml", "--name", "there")
    assert "stop with `smpkit stop there --backend kubernetes --region mine`" in sent.stderr
    assert {each.args for each in connect.call_args_list} == {(None, "mine")}


def test_sources_that_are_too_large_are_named_with_what_to_do(user: User) -> None:
    user.write("")
    (user.folder / "large.bin").write_bytes(os.urandom(2**20))
    refused = user.run("submit", "job.yaml", code=2).stderr
    assert "source_dir: makes 1,0" in refused
    assert "most are the packed sources" in refused
    assert "`backend.kubernetes.code`" in refused
    assert "ConfigMap" in manifests(user, "--set", f"backend.kubernetes.code={user.shared}")


def test_dependencies_beside_a_folder_in_the_image_are_refused(user: User) -> None:
    (user.folder / "helper.py").touch()
    user.write("", kubernetes={"code": str(user.shared)}, dependencies=["helper.py"])
    refused = user.run("submit", "job.yaml", code=2).stderr
    assert "dependencies: are not sent: `backend.kubernetes.code` names a folder with sources" in refused


@pytest.mark.slow
def test_sources_may_lie_in_a_volume(user: User) -> None:
    (user.shared / "src").mkdir()
    (user.shared / "src" / "train.py").write_text("print('from the volume')")
    user.write("", hosts=1, kubernetes={"code": str(user.shared / "src")})
    user.run("submit", "job.yaml", "--name", "there", "--wait")
    assert "from the volume" in user.run("logs", "there").stdout


@pytest.mark.parametrize("kind", ["Job", "Secret"])
def test_a_job_that_is_refused_leaves_nothing(user: User, kind: str) -> None:
    user.write("")
    user.cluster.refused.add(kind)
    refused = user.run("submit", "job.yaml", "--name", "refused", code=4)
    assert f"cannot create the {kind} `refused`: {kind} is forbidden" in refused.stderr
    assert not user.cluster.objects
    assert "there is no job `refused` in namespace `team`" in user.run("status", "refused", code=2).stderr


@pytest.mark.parametrize("kind", ["Job", "ConfigMap"])
def test_ctrl_c_before_an_answer_leaves_nothing(user: User, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of a Job whose ConfigMap never comes would wait for it, and keep the GPUs of their nodes."""

    def interrupted(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        created = Cluster.create(user.cluster, manifest)
        if manifest["kind"] == kind:
            raise KeyboardInterrupt
        return created

    user.write("")
    monkeypatch.setattr(user.cluster, "create", interrupted)
    assert "interrupted" in user.run("submit", "job.yaml", "--name", "half", code=130).stderr
    assert not user.cluster.objects


@pytest.mark.parametrize("kind", ["Job", "ConfigMap"])
def test_a_lost_answer_starts_no_second_job(user: User, kind: str) -> None:
    user.write("print('once')", quick=True, hosts=1)
    user.cluster.lost.add(kind)
    user.run("submit", "job.yaml", "--name", "once", "--wait")
    assert len(user.pods("once")) == 1
    assert "already exists" in user.run("submit", "job.yaml", "--name", "once", code=4).stderr
    assert user.status("once")["status"] == "Completed"


def test_a_lost_answer_of_another_submission_of_that_name_is_not_ours(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.write("print('once')", quick=True, hosts=1)
    user.run("submit", "job.yaml", "--name", "once", "--wait")
    kept = user.cluster.objects["Job", "once"]
    monkeypatch.setattr(user.cluster, "create", Mock(side_effect=UnreachableError("no answer")))
    assert "it may have been started all the same" in user.run("submit", "job.yaml", "--name", "once", code=4).stderr
    assert user.cluster.objects["Job", "once"] is kept


def test_doctor_lets_the_cluster_check_the_job(user: User) -> None:
    def findings(code: int) -> dict[str, str]:
        found = json.loads(user.run("doctor", "job.yaml", "--json", code=code).stdout)
        return {each["what"]: each["text"] for each in found}

    user.write("")
    good = findings(0)
    assert good["kubernetes"].startswith("Kubernetes v1.34.0 at https://cluster.example.com")
    assert good["job"] == "the cluster would take the job in `team`"
    assert user.cluster.dry == ["Job", "ConfigMap", "Secret", "Service"]
    user.cluster.refused.add("Secret")
    assert findings(1)["job"].endswith("Secret is forbidden")
    assert not user.cluster.objects
