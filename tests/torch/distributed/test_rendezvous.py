from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import smpkit.torch as smp
from smpkit.errors import DeadlineError, LaunchError, UsageError
from smpkit.torch.core.context import Launch
from smpkit.torch.distributed.rendezvous import connect_store, name_ranks
from tests.deadlines import facts
from tests.torch.steps import on_ranks

ROOT = Path(__file__).parents[3]
SCRIPT = """
import smpkit.torch as smp
smp.init({"ddp": True})
ranks = smp.allgather(smp.rank())
place = f"rank {smp.rank()} of {smp.size()}, local {smp.local_rank()} of {smp.local_size()}"
print(f"{place}: {ranks}\\n", end="", flush=True)
"""


def run(arguments: list[str], folder: Path, port: int) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    environment = {**os.environ, **allowed, "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*arguments, sys.executable, "-W", "error", str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)


def test_a_plain_script_without_a_launcher_runs_and_ends_silently(tmp_path: Path, reserved_port: int) -> None:
    done = run([], tmp_path, reserved_port)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 of 1, local 0 of 1: [0]\n", "")


def test_a_bare_mpirun_needs_no_master_address(tmp_path: Path, reserved_port: int) -> None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun here")
    done = run([mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2"], tmp_path, reserved_port)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert lines == [f"rank {rank} of 2, local {rank} of 2: [0, 1]" for rank in range(2)]


def test_several_hosts_without_a_master_address_are_told_what_to_pass() -> None:
    with pytest.raises(UsageError, match=r"several hosts, and MASTER_ADDR is not set\nhint: .*mpirun -x MASTER_ADDR"):
        connect_store(Launch(1, 4, 1, 2, "Open MPI", "job"), None, timedelta(seconds=1))


def test_a_taken_port_is_said_with_the_variable_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        launch = Launch(0, 2, 0, 2, "torchrun", "", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(LaunchError, match=r"rank 0 cannot listen at 127.0.0.1:\d+"):
            connect_store(launch, None, timedelta(seconds=2))


def _listens_at(port: int, address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.fixture
def served(reserved_port: int) -> Iterator[Launch]:
    """Return rank 1 of a job on this host whose rank 0 serves its store at a port that was given."""
    launch = Launch(0, 2, 0, 2, "Open MPI", "job-a", "127.0.0.1", reserved_port)
    store = connect_store(launch, None, timedelta(seconds=20))
    yield replace(launch, rank=1, local_rank=1)
    del store


def test_the_store_of_a_job_on_one_host_listens_at_the_loopback_address_alone(served: Launch) -> None:
    """Whoever reached any other address of the machine could read and write it. All of 127.0.0.0/8 leads to `lo`."""
    assert served.master_port is not None
    assert _listens_at(served.master_port, "127.0.0.1")
    assert not _listens_at(served.master_port, "127.0.0.2")
    assert connect_store(served, None, timedelta(seconds=20)).get("smpkit/job")


def test_jobs_with_one_port_do_not_mix(served: Launch) -> None:
    """Rank 1 of the second job joined the first one, which then lost it and died."""
    stranger = replace(served, job_id="job-b")
    with pytest.raises(LaunchError, match=r"rank 1 found another job at port \d+\nhint: two jobs were given one port"):
        connect_store(stranger, None, timedelta(seconds=20))
    with pytest.raises(LaunchError, match=r"rank 0 cannot listen at 127\.0\.0\.1"):
        connect_store(replace(stranger, rank=0, local_rank=0), None, timedelta(seconds=20))
    connect_store(served, None, timedelta(seconds=20))


@on_ranks(3)
def test_a_rank_that_never_calls_init_is_named() -> None:
    if os.environ["RANK"] == "1":
        return
    if os.environ["RANK"] == "0":
        facts().wait(["smpkit/1/facts/1/2"])  # rank 2 is there
    with pytest.raises(DeadlineError) as caught:
        smp.init({"timeout_seconds": 1, "ddp": True})
    assert os.environ["RANK"] != "0" or caught.value.message == "rank 0 waited 1 s in smp.init() for rank 1"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "the other ranks"),
        ([2], "rank 2"),
        ([0, 2, 3], "ranks 0, 2 and 3"),
        (list(range(20)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
    ids=["none", "one", "some", "many"],
)
def test_ranks_are_named_for_people(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
