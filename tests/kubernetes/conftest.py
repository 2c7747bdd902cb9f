"""What the tests of Kubernetes share: a namespace whose pods are processes, and `smpkit` as users call it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from smpkit_estimator.kubernetes import backend
from tests.container.test_peers import free_ports
from tests.job_contract import SCRIPT, Client, in_this_process
from tests.kubernetes.api import Cluster, Pod
from tests.leftovers import processes_with


@dataclass
class User(Client):
    """Somebody with a job file in the current folder, who calls `smpkit`."""

    cluster: Cluster
    folder: Path
    shared: Path
    """A folder that all nodes see, at the same place as the pods."""
    port: int

    def run(self, *arguments: str, code: int = 0) -> Result:
        return in_this_process(*arguments, code=code)

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

    def pods(self, name: str) -> list[Pod]:
        return self.cluster.pods.get(name, [])

    def until_logged(self, name: str, text: str) -> None:
        def logged() -> bool:
            return any(text.encode() in line for pod in self.pods(name) for line in tuple(pod.lines))

        self.until(logged, f"`{text}` in the log of {name}")

    def told(self) -> str:
        pods = (pod for pods in self.cluster.pods.values() for pod in pods)
        return "\n".join(f"--- {pod.name}\n{b''.join(pod.lines).decode()[-3000:]}" for pod in pods)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    """A user of the cluster, of whose jobs nothing is left afterwards."""
    folder, shared, nodes = tmp_path / "work", tmp_path / "shared", tmp_path / "nodes"
    for each in (folder, shared, nodes):
        each.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SMPKIT_BACKEND", "kubernetes")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster = Cluster(nodes)
    monkeypatch.setattr(backend, "connect", lambda *_: cluster)
    with free_ports() as port:
        pass
    yield User(cluster, folder, shared, port)
    cluster.close()
    deadline = time.monotonic() + 10
    while processes_with(f"SMPKIT_BASE_DIR={nodes}"):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.05)
