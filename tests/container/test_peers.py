"""Two launchers as on two hosts; both names lead to this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smpkit.errors import LaunchError
from smpkit_container.peers import meet
from smpkit_container.topology import Topology

HOSTS = ["localhost", "127.0.0.2"]

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group('gloo')
x = torch.ones(1); dist.all_reduce(x)
print(os.environ['SM_CURRENT_HOST'], os.environ['RANK'], x.item())
dist.destroy_process_group()
"""

WAIT = """
import os, signal, sys, time, pathlib
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print('saved', flush=True), sys.exit(0)))
os.write(1, b'ready\\n')  # not printed: the signal could come while that lasts, in which a handler must not
time.sleep(600)
"""


@contextmanager
def free_ports() -> Iterator[int]:
    """Reserve the port at which ranks meet, and the next one, for the launchers.

    Bound and not listening, they are left to those that set SO_REUSEADDR, as both do.
    """
    while True:
        with socket.socket() as first, socket.socket() as second:
            for reservation in (first, second):
                reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            yield port
            return


def start(tmp_path: Path, number: int, script: str, port: int, **variables: str) -> subprocess.Popen[str]:
    base = tmp_path / str(number)
    config = base / "input" / "config"
    config.mkdir(parents=True)
    (base / "code").mkdir()
    (base / "code" / "train.py").write_text(script)
    values = {"sagemaker_program": "train.py", "mp_parameters": {"ddp": True, "ddp_port": port}}
    encoded = {name: json.dumps(value) for name, value in values.items()}
    (config / "hyperparameters.json").write_text(json.dumps(encoded))
    resources = {"hosts": HOSTS, "current_host": HOSTS[number], "network_interface_name": "lo"}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    ours = {"SMPKIT_BASE_DIR": str(base), "SMPKIT_DIE_WITH_PARENT": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "smpkit_container", "train"],
        env={**os.environ, **ours, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    written = [process.communicate(timeout=150) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, written, strict=True)]


def await_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()


def test_two_hosts_with_torchrun_form_one_world(tmp_path: Path) -> None:
    with free_ports() as port:
        first, second = ends([start(tmp_path, number, ALL_REDUCE, port) for number in range(2)])
    assert (first[0], second[0]) == (0, 0)
    assert (first[1], second[1]) == ("[rank 0] localhost 0 2.0\n", "[rank 1] 127.0.0.2 1 2.0\n")


def test_a_rank_that_fails_on_one_host_ends_the_other_with_its_reason(tmp_path: Path) -> None:
    fails = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\ntime.sleep(600)"
    began = time.monotonic()
    with free_ports() as port:
        first, second = ends([start(tmp_path, number, fails, port) for number in range(2)])
    assert time.monotonic() - began < 300
    assert first[0] == second[0] == 1
    assert "ValueError: bad batch" in second[2]
    assert "failed on another host, 127.0.0.2: rank 1: ValueError: bad batch" in first[2]
    reason = (tmp_path / "0" / "output" / "failure").read_text()
    assert reason.splitlines()[0] == "rank 1: ValueError: bad batch"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_vanishes_ends_the_other(tmp_path: Path, lost: int) -> None:
    with free_ports() as port:
        processes = [start(tmp_path, number, WAIT, port) for number in range(2)]
        for process in processes:
            await_ready(process)
        processes[lost].kill()
        status, _, err = ends(processes)[1 - lost]
    assert status == 1
    assert f"{HOSTS[lost]}: the host was lost" in err


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_of_one_host_stops_all_with_time_to_save(tmp_path: Path, asked: int) -> None:
    with free_ports() as port:
        processes = [start(tmp_path, number, WAIT, port) for number in range(2)]
        for process in processes:
            await_ready(process)
        processes[asked].send_signal(signal.SIGTERM)
        first, second = ends(processes)
    assert (first[0], second[0]) == (0, 0)
    assert "saved" in first[1]
    assert "saved" in second[1]


@pytest.mark.parametrize("present", [0, 1])
def test_a_host_that_never_comes_is_named(tmp_path: Path, present: int) -> None:
    with free_ports() as port:
        [(status, _, err)] = ends([start(tmp_path, present, "", port, SMPKIT_START_SECONDS="1")])
    assert status == 1
    assert f"{HOSTS[present]} waited 1 s for {HOSTS[1 - present]}" in err


def test_a_stranger_is_not_taken_for_a_host() -> None:
    topology = Topology(("localhost", "other"), 0, 1, "torchrun")
    with free_ports() as port, socket.socket() as stranger:

        def knock() -> None:
            with contextlib.suppress(OSError):  # it comes when nobody waits any longer
                while stranger.connect_ex(("127.0.0.1", port)):
                    time.sleep(0.01)
                stranger.sendall(b'{"type": "hello", "host": "somebody", "facts": {}}\n{"x"')

        thread = threading.Thread(target=knock, daemon=True)
        thread.start()
        with pytest.raises(LaunchError, match="waited 3 s for other"), meet(topology, {}, 3.0, port):
            pass
