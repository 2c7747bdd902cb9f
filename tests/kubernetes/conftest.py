"""What the tests of Kubernetes share: a fake cluster that runs pods as processes, and `smpkit` as users call it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from smpkit.cli.main import cli
from smpkit.testing import FakeKubernetes
from tests.container.test_peers import free_ports
from tests.leftovers import processes_with
from tests.slurm.conftest import PIPELINE, SCRIPT

__all__ = ["PIPELINE", "User"]


@dataclass
class User:
    """Somebody with a job file in the current folder, who calls `smpkit`."""

    cluster: FakeKubernetes
    folder: Path
    shared: Path
    """A folder that all nodes see, at the same place as the pods."""
    port: int

    def write(self, script: str | None = None, *, quick: bool = False, **job: Any) -> None:
        """Write the script, default: the one of the tests in containers, and the job file.

        Args:
            quick: run it from a shell script, without ranks, which would import torch.
        """
        if quick:
            (self.folder / "run.sh").write_text(f'exec {sys.executable} train.py "$@"')
            job = {"entry_point": "run.sh", "distribution": None, **job}
        (self.folder / "train.py").write_text(SCRIPT.read_text() if script is None else script)
        volume = {"mount": str(self.shared), "host_path": str(self.shared)}
        options = {"port": self.port, "volumes": [volume], **job.pop("kubernetes", {})}
        whole = {
            "entry_point": "train.py",
            "image": "registry.io/team/smpkit:1",
            "output": str(self.shared / "out"),
            "checkpoints": str(self.shared / "checkpoints"),
            "backend": {"kubernetes": options},
            "distribution": {"torch_distributed": {"enabled": True, "processes_per_host": 1}},
            "compute": {"instance_count": job.pop("hosts", 2)},
            **job,
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump({k: v for k, v in whole.items() if v is not None}))

    def run(self, *arguments: str, code: int | None = 0) -> Result:
        """Call `smpkit`, and check how it ends."""
        done = CliRunner().invoke(cli, arguments)
        if code is not None:
            assert done.exit_code == code, f"smpkit {arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
        return done

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", name, "--json").stdout)
        return found

    def until_logged(self, name: str, text: str) -> None:
        def logged() -> bool:
            runs = [run for pod, run in self.cluster.controller.runs.items() if pod.startswith(name)]
            return any(text.encode() in line for run in runs for _, line in tuple(run.lines))

        self.until(logged, f"`{text}` in the log of {name}")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}\n{self.told()}"
            time.sleep(0.05)

    def told(self) -> str:
        """What there is to know after a failure."""
        runs = self.cluster.controller.runs.items()
        return "\n".join(
            f"--- {name}\n{b''.join(line for _, line in run.lines).decode()[-3000:]}" for name, run in runs
        )


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as cluster:
        yield cluster


@pytest.fixture
def user(cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """A user of the cluster, of whose jobs nothing is left afterwards."""
    folder, shared = tmp_path / "work", tmp_path / "shared"
    folder.mkdir()
    shared.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("SMPKIT_BACKEND", "kubernetes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with free_ports() as port:
        pass
    yield User(cluster, folder, shared, port)
    cluster.close()
    deadline = time.monotonic() + 10
    while processes_with(f"SMPKIT_BASE_DIR={cluster.controller._folder}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_with(f"SMPKIT_BASE_DIR={cluster.controller._folder}")
