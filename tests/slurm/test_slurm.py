"""Jobs on a real Slurm of two nodes: what users see, and what is left when something is lost."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smpkit_estimator.slurm.folder import read_json
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
from tests.leftovers import processes_with
from tests.slurm.conftest import User

ODD = "a,b 'q' \"d\"\nnew $HOME `x` \\ é%j"

FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
time.sleep(600)
"""

WAITS = """
import os, signal, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
print("ready", flush=True)
while not stopped:
    time.sleep(0.05)
print("saved", flush=True)
"""


def losses(user: User, name: str) -> str:
    return (user.place(name) / "model" / "losses.txt").read_text()


# ---- what a job is -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipeline_over_two_nodes(user: User) -> None:
    """The run, from what the dry run shows to what is kept; losses are those of plain PyTorch in one process."""
    user.write(distribution=PIPELINE, hyperparameters={"steps": 6}, secrets={"KEY": {"variable": "MY_KEY"}})
    user.environ["MY_KEY"] = "hush-hush"
    dry = json.loads(user.run("submit", "job.yaml", "--dry-run", "--json", "--name", "pipe").stdout)
    a_job_that_succeeds(user.run, "pipe", ("n1", "n2"))
    job_id = str(read_json(user.place("pipe") / "slurm.json")["id"])
    assert user.cluster.ask("scontrol", "write", "batch_script", job_id, "-").rstrip("\n") + "\n" == dry["script"]
    for name in ("hyperparameters", "inputdataconfig"):
        assert read_json(user.place("pipe") / "input" / "config" / f"{name}.json") == dry[name]
    variables = read_json(user.place("pipe") / "variables.json")
    assert variables == {**dry["variables"], "KEY": "hush-hush"}
    assert losses(user, "pipe") == uninterrupted()
    a_report_of_it(user.run, "pipe")
    assert user.status("pipe")["model_data"] == str(user.place("pipe") / "model")
    lines = [json.loads(line) for line in user.run("logs", "pipe", "--rank", "1", "--json").stdout.splitlines()]
    assert next(line["text"] for line in lines if "step 6" in line["text"]).startswith("[rank 1] step 6 on n2: ")
    assert "n1 [rank 0] step 6 on n1: " in user.run("logs", "pipe", "--tail", "3", "--host", "n1").stdout
    for name in ("token", "variables.json"):
        assert stat.S_IMODE((user.place("pipe") / name).stat().st_mode) == 0o600
    assert "hush-hush" not in json.dumps(dry) + user.log("pipe")


def test_the_first_failing_rank_is_the_jobs_end(user: User) -> None:
    user.write(FAILS, hyperparameters={"text": ODD})
    a_job_that_fails(user.run, "fails", "ValueError: bad batch", "n2")
    assert not user.processes("fails")


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["low", "grace"])
def test_a_preempted_job_goes_on_where_it_was(user: User, partition: str) -> None:
    """SIGTERM, saved, queued again, and the same losses as without: a job of higher priority came between.

    Ranks that save and end before a partition's time of grace is over have ended well for Slurm: there the batch
    script queues the job itself.
    """
    user.write(distribution=PIPELINE, hyperparameters={"steps": 6, "seconds": 0.5}, slurm={"partition": partition})
    user.run("submit", "job.yaml", "--name", "first")
    user.until_logged("first", "step 2 on")
    user.cluster.ask("sbatch", "-N2", "--exclusive", "-p", "high", "--output=/dev/null", "--wrap", "sleep 1")
    user.until_logged("first", "saved and stopping")
    user.hurry("first")
    user.run("status", "first", "--watch", timeout=170)
    assert "resumed at step" in user.log("first")
    assert user.status("first")["interruptions"] == 1
    assert losses(user, "first") == uninterrupted()


@pytest.mark.slow
def test_stop_gives_ranks_time_to_save_and_resume_goes_on(user: User) -> None:
    a_job_that_is_stopped_goes_on(OnCluster(user, lambda name: losses(user, name)))
    refused = user.run("resume", "old", "--instance-type", "ml.x", code=2)
    assert "`--instance-type` is not for Slurm" in refused.stderr


# ---- what is lost ------------------------------------------------------------------------------------------------


def read_of(pid: int, what: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_killed_launcher_ends_the_job_with_its_name(user: User, node: str) -> None:
    user.write(WAITS)
    user.run("submit", "job.yaml", "--name", "orphan")
    user.until(lambda: user.log("orphan").count("ready") == 2, "both ranks")
    launcher = min(
        pid for pid in launchers(user, "orphan") if f"SLURMD_NODENAME={node}".encode() in read_of(pid, "environ")
    )
    os.kill(launcher, signal.SIGKILL)
    user.run("status", "orphan", "--watch", code=1)
    reason = user.status("orphan")["failure"]["reason"]
    assert reason.startswith(f"the host was lost: its launcher was killed\non {node}; ")
    user.until(lambda: not user.processes("orphan"), "the ranks to end", 30)


def launchers(user: User, name: str) -> list[int]:
    found = []
    for pid in processes_with(f"SMPKIT_VARIABLES={user.place(name) / 'variables.json'}"):
        words = read_of(pid, "cmdline")
        if b"smpkit_container" in words and b"srun" not in words[0]:
            found.append(pid)
    return found


@pytest.mark.slow
def test_a_lost_node_queues_the_job_again_and_it_goes_on(user: User) -> None:
    user.write(distribution=PIPELINE, hyperparameters={"steps": 200, "seconds": 0.3})
    user.run("submit", "job.yaml", "--name", "lost")
    user.until_logged("lost", "step 2 on")
    user.cluster.daemons["n2"].kill()
    user.cluster.daemons["n2"].wait()
    user.until(lambda: user.status("lost")["interruptions"] == 1, "Slurm to miss n2", 120)
    user.cluster.start_node("n2")
    user.hurry("lost")
    user.until_logged("lost", "resumed at step")
    user.run("stop", "lost", "--wait")


# ---- stopping and queueing again ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_scancel_gives_ranks_the_clusters_time_to_save(user: User) -> None:
    user.write(WAITS)
    job_id = json.loads(user.run("submit", "job.yaml", "--name", "cancelled", "--json").stdout)["id"]
    user.until(lambda: user.log("cancelled").count("ready") == 2, "both ranks")
    user.cluster.ask("scancel", job_id)
    user.run("status", "cancelled", "--watch", code=1)
    assert user.status("cancelled")["status"] == "Stopped"
    assert user.log("cancelled").count("saved") == 2


@pytest.mark.slow
def test_a_warning_before_the_time_limit_reaches_the_script_and_does_not_end_the_launcher(user: User) -> None:
    """`#SBATCH --signal=USR1@90` of many scripts (Lightning's, submitit's): Slurm sends it to all of a step."""
    user.write(WAITS.replace("SIGTERM", "SIGUSR1"))
    job_id = json.loads(user.run("submit", "job.yaml", "--name", "warned", "--json").stdout)["id"]
    user.until(lambda: user.log("warned").count("ready") == 2, "both ranks")
    user.cluster.ask("scancel", "--signal=USR1", job_id)
    user.run("status", "warned", "--watch")
    assert user.log("warned").count("saved") == 2


@pytest.mark.slow
def test_a_job_that_waits_is_stopped_at_once(user: User) -> None:
    user.cluster.ask("sbatch", "-N2", "--exclusive", "-p", "high", "--output=/dev/null", "--wrap", "sleep 60")
    user.write(WAITS)
    user.run("submit", "job.yaml", "--name", "waits")
    assert user.status("waits")["phase"] == "Pending"
    user.run("stop", "waits", "--wait")
    assert user.status("waits")["status"] == "Stopped"


# ---- logs, containers, allocations -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_of_a_hundred_thousand_lines_is_followed_whole(user: User) -> None:
    user.write("import os\nfor n in range(50_000): print('line', os.environ['RANK'], n)")
    a_long_log_is_followed_whole(user.run, "n2", 50_000)


@pytest.mark.slow
def test_an_image_is_started_by_apptainer(user: User, tmp_path: Path) -> None:
    """A program in its place that notes how it was called, and runs the rest here."""
    tools = tmp_path / "tools"
    tools.mkdir()
    called = tmp_path / "called"
    stand_in = tools / "apptainer"
    stand_in.write_text(
        f'#!/bin/bash\necho "$*" >> {called}\nwhile [ "$1" != docker://registry.io/team/smpkit:1 ]; do shift; done\n'
        f'shift\n[ "$1" = python3 ] && shift && exec {sys.executable} "$@"\nexec "$@"\n'
    )
    stand_in.chmod(0o755)
    user.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    user.write("print('inside')", image="registry.io/team/smpkit:1")
    assert "inside" in user.run("submit", "job.yaml", "--name", "boxed", "--follow").stdout
    [first, *_] = called.read_text().splitlines()
    assert first.startswith(f"exec --bind {user.environ['SMPKIT_RUNS']}:{user.environ['SMPKIT_RUNS']} docker://")


def test_run_inside_an_allocation_names_the_line_that_works(user: User) -> None:
    """The line is taken from the message, and run."""
    user.write("import os; print(os.environ['SLURM_PROCID'], os.environ['MASTER_ADDR'])")
    smpkit = Path(sys.executable).with_name("smpkit")
    around = {**os.environ, **user.environ, "PATH": f"{smpkit.parent}:{os.environ['PATH']}"}
    words = f'said=$({smpkit} run job.yaml 2>&1); echo "$said"\neval "$(grep -o "MASTER_ADDR=.*train.py" <<< "$said")"'
    done = subprocess.run(
        ["salloc", "-N2", "-n2", "-p", "low", "bash", "-c", words], cwd=user.folder, env=around, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "`smpkit run` uses one machine, and this is an allocation of 2 nodes" in done.stdout, done.stderr
    assert {"0 n1", "1 n1"} <= set(done.stdout.splitlines()), done.stdout + done.stderr


@pytest.mark.slow
def test_srun_alone_is_a_launcher(user: User) -> None:
    """Without a job file: `srun python train.py`, as the how-to says."""
    user.write(
        "import smpkit.torch as smp\nsmp.init({'ddp': True})\nprint(smp.rank(), smp.allgather(smp.rank(), smp.WORLD))"
    )
    around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "OMP_NUM_THREADS": "1"}
    text = subprocess.run(
        ["srun", "-N2", "-n2", "-p", "low", sys.executable, "train.py"],
        cwd=user.folder, env={**os.environ, **around}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert sorted(text.stdout.splitlines()) == ["0 [0, 1]", "1 [0, 1]"], text.stderr


# ---- what is refused, and what is looked at ----------------------------------------------------------------------


def test_what_slurm_cannot_do_is_refused_by_name(user: User) -> None:
    def refused(*told: str, **job: Any) -> None:
        user.write("", **job)
        said = user.run("submit", "job.yaml", code=2).stderr
        assert [words for words in told if words not in said] == []

    elsewhere: dict[str, Any] = {"output": "s3://bucket/out", "inputs": {"train": "s3://b-b/data"}, "image": "x:1"}
    refused("gres: is given together with gpus_per_node", slurm={"gres": "gpu:1", "gpus_per_node": 1})
    refused("backend.slurm.array: would be several jobs", slurm={"array": [{"lr": 1}]})
    refused(
        *("output: is not a folder that the nodes see", "inputs.train: is not on this machine"),
        *("image: is a container image, and neither pyxis nor Apptainer was found", "3 problems in the job for Slurm"),
        **elsewhere,
    )
    user.write("", slurm={"partition": "none"})
    said = user.run("submit", "job.yaml", "--name", "refused", code=4).stderr
    assert "cannot start job `refused`: Slurm refused: " in said
    assert not user.place("refused").exists()
    assert "there is no job `refused`" in user.run("status", "refused", code=2).stderr


def test_doctor_asks_whether_slurm_would_take_the_job(user: User) -> None:
    user.write("", nodes=3)
    refused = json.loads(user.run("doctor", "job.yaml", "--write", "--json", code=1).stdout)
    findings = {item["what"]: item for item in refused}
    assert findings["slurm"]["text"].endswith("cluster `test` answers")
    assert findings["partition"]["text"].startswith("this job cannot run: Slurm refused: ")
    assert findings["runs"]["text"].startswith("wrote to and deleted from ")
    user.write("", nodes=2)
    found = json.loads(user.run("doctor", "job.yaml", "--json").stdout)
    assert "Slurm would start 2 nodes for the job" in [item["text"] for item in found]
    user.environ["PATH"] = str(Path(sys.executable).parent)
    lost = json.loads(user.run("doctor", "--json", "--backend", "slurm", code=1).stdout)
    assert [item["state"] for item in lost if item["what"] == "slurm"] == ["problem"]
