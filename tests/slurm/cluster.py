"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, in a folder and on ports of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.leftovers import kill_processes_with

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_SECONDS = 30.0

_CONFIGURATION = """\
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
SlurmctldPort={controller}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1,batch_sched_delay=0,preempt_youngest_first
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillWait=30
SlurmdTimeout=10
UnkillableStepTimeout=180
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=grace Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return why no Slurm can be started here; None if one can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None]
    if absent:
        return f"{', '.join(absent)} not installed: `apt-get install --no-install-recommends slurm-wlm munge`"
    return None


@dataclass
class Cluster:
    """A cluster that runs; `environ` leads commands to it."""

    root: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            command, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_node(self, name: str) -> None:
        """Start a slurmd and wait until its node takes jobs."""
        self.daemons[name] = self._daemon("slurmd", "-D", "-f", str(self.root / "slurm.conf"), "-N", name)
        self.until(lambda: self.state(name) in ("idle", "mixed", "allocated"), f"{name} to take jobs")

    def state(self, node: str) -> str:
        return self.ask("sinfo", "-h", "-N", "-n", node, "-o", "%T").split()[0]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}\n{self.tails()}"
            time.sleep(0.1)

    def tails(self) -> str:
        """Return the ends of the daemons' logs."""
        files = sorted(self.root.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-600:]}" for path in files)

    def begin(self) -> None:
        """Start all daemons."""
        munge = self.root / "munge"
        munge.mkdir(mode=0o700)
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        socket_path = self.root / "munge.socket"
        self.daemons["munged"] = self._daemon(
            "munged", "--force", "--foreground", f"--key-file={key}", f"--socket={socket_path}",
            f"--pid-file={munge}/pid", f"--seed-file={munge}/seed", f"--log-file={munge}/log",
        )  # fmt: skip
        self.until(socket_path.exists, "munged")
        self.daemons["slurmctld"] = self._daemon("slurmctld", "-D", "-f", str(self.root / "slurm.conf"))
        self.until(self._answers, "slurmctld")
        for name in ("n1", "n2"):
            self.start_node(name)

    def end(self) -> None:
        """Cancel what runs, end all daemons, and kill what is left of any job."""
        with contextlib.suppress(Exception):
            self.ask("scancel", "--user", "root")
            self.ask("scancel", "--signal=KILL", "--user", "root")
            self.until(lambda: not self.ask("squeue", "-h"), "the jobs to end", 20)
        for process in reversed(self.daemons.values()):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(process.poll() is None for process in self.daemons.values()):
            time.sleep(0.05)
        kill_processes_with(f"SLURM_CONF={self.root}")
        for process in self.daemons.values():
            process.kill()
            process.wait(10)

    def _answers(self) -> bool:
        done = subprocess.run(
            ["sinfo", "-h"], env={**os.environ, **self.environ}, capture_output=True, timeout=30, check=False
        )
        return done.returncode == 0

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, **self.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        # What belongs to a test is killed when it fails; the cluster belongs to all of them.
        environ.pop("PYTEST_CURRENT_TEST", None)
        with (self.root / f"{command[0]}.out").open("ab") as output:
            return subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )


@contextlib.contextmanager
def start(root: Path) -> Iterator[Cluster]:
    """Start a cluster below `root`, whose path must be short: it holds sockets."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        controller, first, second = (each.getsockname()[1] for each in sockets)
    for name in ("state", "spool-n1", "spool-n2"):
        (root / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    # Ports are made of the numbers of jobs: those of another cluster on this machine must be others.
    first_job = random.randrange(1, 1_000_000)
    text = _CONFIGURATION.format(
        host=host, root=root, controller=controller, first=first, second=second, first_job=first_job
    )
    (root / "slurm.conf").write_text(text)
    cluster = Cluster(root)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
