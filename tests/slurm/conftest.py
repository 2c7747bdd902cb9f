"""What the tests of Slurm share: one cluster for all of them, and the command line as users call it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.job_contract import SCRIPT, Client
from tests.leftovers import processes_with
from tests.slurm.cluster import Cluster, missing, start


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of two nodes; afterwards nothing of it is left."""
    why = missing()
    if why is not None:
        pytest.skip(why)
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with start(root) as cluster:
            yield cluster
        assert not processes_with(f"SLURM_CONF={root}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


@dataclass
class User(Client):
    """Somebody with a job file in the current folder, who calls `smpkit`."""

    cluster: Cluster
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def write(self, script: str | None = None, **job: Any) -> None:
        """Write the script, default: the one of the tests in containers, and the job file."""
        (self.folder / "train.py").write_text(SCRIPT.read_text() if script is None else script)
        options = {"partition": "low", **job.pop("slurm", {})}
        compute = {"instance_count": job.pop("nodes", 2)}
        ranks = {"torch_distributed": {"enabled": True, "processes_per_host": 1}}
        whole = {
            "entry_point": "train.py",
            "backend": {"slurm": options},
            "distribution": ranks,
            "compute": compute,
            **job,
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump(whole))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `smpkit`."""
        command = [str(Path(sys.executable).with_name("smpkit")), *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, **self.environ}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, code: int | None = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Call `smpkit`, and check how it ends."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"smpkit {arguments} hung\n{out}{err}\n{self.told()}") from None
        if code is not None:
            assert process.returncode == code, f"smpkit {arguments}: {process.returncode}\n{out}{err}\n{self.told()}"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def place(self, name: str) -> Path:
        """The folder of a run."""
        return Path(self.environ["SMPKIT_RUNS"]) / name

    def log(self, name: str) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.place(name).glob("logs/*.log")))

    def until_logged(self, name: str, text: str) -> None:
        self.until(lambda: text in self.log(name), f"`{text}` in the log of {name}")

    def hurry(self, name: str) -> None:
        """Let a job that was queued again start at once: Slurm waits two minutes before it does."""

        def queued() -> bool:
            found = self.status(name)
            return (found["interruptions"], found["phase"]) == (1, "Pending")

        self.until(queued, f"{name} to be queued again", 120)
        sent = json.loads((self.place(name) / "slurm.json").read_text())
        self.cluster.ask("scontrol", "update", f"JobId={sent['id']}", "StartTime=now")

    def told(self) -> str:
        names = [path.name for path in Path(self.environ["SMPKIT_RUNS"]).glob("*")]
        logs = "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in names)
        return f"{logs}\n{self.cluster.ask('squeue', '--states=all')}\n{self.cluster.tails()}"

    def processes(self, name: str) -> list[int]:
        """The processes of a job: its launchers and ranks."""
        return processes_with(f"TRAINING_JOB_NAME={name}")


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """A user of the cluster, whose jobs are gone afterwards."""
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    folder, runs = tmp_path / "work", tmp_path / "runs"
    folder.mkdir()
    around = {"SMPKIT_RUNS": str(runs), "SMPKIT_BACKEND": "slurm", "SMPKIT_SETTLE_SECONDS": "0.5"}
    yield User(cluster, folder, {**around, "OMP_NUM_THREADS": "1"})
    for name in ("n1", "n2"):
        if cluster.daemons[name].poll() is not None:
            cluster.start_node(name)
    cluster.ask("scancel", "--signal=KILL", "--user=root")
    cluster.ask("scancel", "--user=root")
    cluster.until(lambda: not cluster.ask("squeue", "-h"), "the jobs to end", 60)
