"""Two launchers as on two hosts; both names lead to this machine."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from smpkit.config.wire import TOKEN_FILE
from smpkit.errors import LaunchError
from smpkit_container.aws import job_token
from smpkit_container.environment import Environment, Folders, Resources
from smpkit_container.peers import News, Peers, meet
from smpkit_container.topology import Topology
from tests.end_to_end.launcher_job import Job
from tests.leftovers import processes_with

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


Started = subprocess.Popen[str]


def start(tmp_path: Path, number: int, script: str, port: int, *, token: str = "", **variables: str) -> Started:
    values: dict[str, object] = {"mp_parameters": {"ddp": True, **({"ddp_port": port} if port else {})}}
    if token:
        values[TOKEN_FILE] = token
    job = Job(tmp_path / str(number), "torchrun", script, ranks=1, hyperparameters=values, environ=variables)
    resources = {"hosts": HOSTS, "current_host": HOSTS[number], "network_interface_name": "lo"}
    (job.base / "input" / "config" / "resourceconfig.json").write_text(json.dumps(resources))
    return job.start()


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    written = [process.communicate(timeout=150) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, written, strict=True)]


@contextmanager
def two_that_wait(tmp_path: Path, script: str = WAIT) -> Iterator[list[Started]]:
    """Start both launchers, and go on when both ranks are ready."""
    with free_ports() as port:
        processes = [start(tmp_path, number, script, port) for number in range(2)]
        for process in processes:
            assert "ready" in (process.stdout.readline() if process.stdout else "")
        yield processes


@contextmanager
def meanwhile(does: Callable[..., object], *arguments: object) -> Iterator[threading.Thread]:
    """Do something in another thread, and wait for its end."""
    thread = threading.Thread(target=does, args=arguments, daemon=True)
    thread.start()
    yield thread
    thread.join(60)


@pytest.mark.parametrize(
    ("rank", "statement", "codes", "headline"),
    [
        (1, "raise ValueError('bad batch')", (1, 1), "ValueError: bad batch"),
        (0, "os.kill(os.getpid(), 9)", (137, 1), "the process was killed by SIGKILL"),
    ],
    ids=["raises", "killed on the first host"],
)
def test_a_rank_that_fails_on_one_host_ends_the_other_with_its_reason(
    tmp_path: Path, rank: int, statement: str, codes: tuple[int, int], headline: str
) -> None:
    fails = f"import os, time\nif os.environ['RANK'] == '{rank}': {statement}\ntime.sleep(600)"
    with free_ports() as port:
        told = ends([start(tmp_path, number, fails, port) for number in range(2)])
    own, other = told[rank], told[1 - rank]
    assert (own[0], other[0]) == codes
    assert headline in own[2]
    assert f"failed on another host, {HOSTS[rank]}: rank {rank}: {headline}" in other[2]
    reason = (tmp_path / str(1 - rank) / "output" / "failure").read_text()
    assert reason.startswith(f"rank {rank}: {headline}")
    assert "another host" not in own[2]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_whose_launcher_is_killed_ends_the_other_and_leaves_nothing(tmp_path: Path, lost: int) -> None:
    with two_that_wait(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '600'])\n" + WAIT) as processes:
        processes[lost].kill()
        status, _, err = ends(processes)[1 - lost]
    assert status == 1
    assert f"{HOSTS[lost]}: the host was lost: its launcher was killed" in err
    deadline = time.monotonic() + 30
    while processes_with(f"SMPKIT_TEST_MARK={tmp_path}"):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.05)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_of_one_host_stops_all_with_time_to_save(tmp_path: Path, asked: int) -> None:
    with two_that_wait(tmp_path) as processes:
        processes[asked].send_signal(signal.SIGTERM)
        for status, out, _ in ends(processes):
            assert (status, "saved" in out) == (0, True)


TOKEN = b"of this job"
FIRST = Topology(("localhost", "127.0.0.2"), 0, 1, "torchrun")
SECOND = Topology(("localhost", "127.0.0.2"), 1, 1, "torchrun")


def knock(port: int, data: bytes) -> socket.socket:
    """Connect, as soon as somebody listens, and say something."""
    deadline = time.monotonic() + 60
    while True:
        stranger = socket.socket()
        if stranger.connect_ex(("127.0.0.1", port)) == 0:
            stranger.sendall(data)
            return stranger
        stranger.close()
        assert time.monotonic() < deadline, "nobody listens"
        time.sleep(0.01)


STRANGERS = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "impostor": b"\x00\x00\x00\x10" + b"x" * 16,
    "huge": b"\x7f\xff\xff\xff",
    "negative": b"\xff\xff\xff\xfe",
    "endless": b"x" * 100_000,
    "silent": b"",
}


def test_strangers_are_neither_taken_for_a_host_nor_waited_for() -> None:
    """An impostor took a host's place, and three silent connections held up the meeting until it failed."""
    come: list[object] = []
    facts = [{"name": "localhost", "ranks": 1, "place": "here"}, {"name": "127.0.0.2", "ranks": 1, "key": "value"}]
    with free_ports() as port, contextlib.ExitStack() as stack:

        def second() -> None:
            for data in [*STRANGERS.values(), b"", b"", b""]:
                stack.callback(knock(port, data).close)
            with meet(SECOND, {"key": "value"}, 60.0, port, TOKEN) as peers:
                come.extend(peers.facts)

        began = time.monotonic()
        with meanwhile(second) as thread, meet(FIRST, {"place": "here"}, 60.0, port, TOKEN) as peers:
            assert peers.facts == facts
            thread.join(60)
        assert come == facts
        assert time.monotonic() - began < 50  # each silent one alone was waited for for 10 s


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_hosts_meet_over_ipv6() -> None:
    """The pods of a cluster with IPv6 waited for the first of them, which listened at addresses of IPv4 only."""
    over_ipv6: list[object] = []

    def second() -> None:
        with meet(replace(SECOND, address="::1"), {}, 20.0, port, TOKEN) as peers:
            over_ipv6.append(peers.own_address)

    with free_ports() as port, meanwhile(second) as thread, meet(FIRST, {}, 20.0, port, TOKEN):
        thread.join(60)
    assert over_ipv6 == ["::1"]


@pytest.mark.parametrize("topology", [FIRST, SECOND], ids=["first", "second"])
def test_hosts_of_two_jobs_do_not_meet(topology: Topology) -> None:
    def meet_another() -> None:
        other = SECOND if topology is FIRST else FIRST
        with contextlib.suppress(LaunchError), meet(other, {}, 3.0, port, b"of another job"):
            pass

    refused = pytest.raises(LaunchError, match="this job's token")
    with free_ports() as port, meanwhile(meet_another), refused, meet(topology, {}, 2.0, port, TOKEN):
        pass


def test_hosts_that_count_their_ranks_differently_say_so() -> None:
    """As where one of eight GPUs has failed: two ranks had the same number, and the others waited for half an hour."""
    said: list[str] = []

    def come(topology: Topology, ranks: int) -> None:
        try:
            with meet(replace(topology, processes_per_host=ranks), {}, 60.0, port, TOKEN):
                said.append("met")
        except LaunchError as error:
            said.append(error.message)

    with free_ports() as port, meanwhile(come, SECOND, 7):
        come(FIRST, 8)
    assert said == ["localhost would start 8 ranks, but 127.0.0.2 7"] * 2


def test_a_host_that_is_gone_while_others_are_awaited_may_come_again() -> None:
    """As a pod that is evicted while nodes are added for the last ones: the job failed before its next pod came."""
    names = ("localhost", "127.0.0.2", "127.0.0.3")
    met: list[int] = []

    def come(number: int, seconds: float) -> None:
        with contextlib.suppress(LaunchError), meet(Topology(names, number, 1, "torchrun"), {}, seconds, port, TOKEN):
            met.append(number)

    with free_ports() as port, meanwhile(come, 0, 30.0):
        come(1, 1.0)  # and give up
        with meanwhile(come, 2, 30.0):
            time.sleep(1)  # for the third one to come
            come(1, 10.0)
    assert sorted(met) == [0, 1, 2]


@contextmanager
def connected(index: int = 0, hosts: int = 2) -> Iterator[tuple[Peers, list[Connection]]]:
    """Yield what one host knows of the others, and the other ends of its connections."""
    pipes = {other: Pipe() for other in (range(1, hosts) if index == 0 else [0])}
    facts = [{"name": f"host-{number}"} for number in range(hosts)]
    try:
        yield Peers(index, facts, {other: ours for other, (ours, _) in pipes.items()}), [p[1] for p in pipes.values()]
    finally:
        for pair in pipes.values():
            for end in pair:
                end.close()


@pytest.mark.parametrize(
    "data",
    [b"not json", b"[1]", b"[" * 100_000, b'{"stop": 999}', b'{"failed": ["a"]}', b"\xff", b"x" * (1 << 24)],
    ids=["text", "list", "nested", "signal", "half", "binary", "huge"],
)
def test_a_host_that_sends_garbage_is_given_up(data: bytes) -> None:
    with connected() as (peers, [theirs]):
        ours = peers.connections[1]
        with meanwhile(send, theirs, data):
            assert not peers.hear(1)
            ours.close()
        assert peers.news == News("host-1", "gave up on the host: it sent garbage", lost=False)
        assert not peers.stop_signal
        assert not peers.connections


def send(connection: Connection, data: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(data)


def test_the_first_host_passes_bad_news_on_to_all_others() -> None:
    with connected(hosts=3) as (peers, [theirs, others]), connected(index=2, hosts=3) as (third, _):
        theirs.send_bytes(b'{"failed": ["host-1", "ValueError", false]}')
        assert not peers.hear(1)
        third.connections[0] = others
        assert not third.hear(0)
        assert third.news == peers.news == News("host-1", "ValueError")
        third.conclude("SIGKILL")  # before the news came
        assert not peers.hear(2)
        assert not peers.connections


@pytest.mark.parametrize(
    ("error", "reason", "lost"),
    [
        (TimeoutError(110, "timed out"), "the host was lost: it fell silent", True),
        (OSError(113, "no route to host"), "the host was lost: it fell silent", True),
        (ConnectionResetError(104, "reset"), "the host was lost: its launcher was killed", False),
        (EOFError(), "the host was lost: its launcher was killed", False),
    ],
    ids=["silent", "no way", "reset", "closed"],
)
def test_only_a_host_whose_machine_or_network_is_gone_is_lost(error: Exception, reason: str, lost: bool) -> None:
    """A scheduler starts a host again that ended because another one was lost; what was killed fails the job."""
    with connected() as (peers, _):
        peers.connections[1] = Mock(recv_bytes=Mock(side_effect=error))
        assert not peers.hear(1)
        assert peers.news == News("host-1", reason, lost=lost)


TWO = Resources(("algo-1", "algo-2"), "algo-1")


def test_the_token_is_the_same_on_all_hosts_and_random_where_there_is_one() -> None:
    job = Environment(Folders(Path("/a")), {"lr": 1}, {"sagemaker_program": "train.py"}, TWO, job_name="job")
    other = replace(job, folders=Folders(Path("/b")), resources=Resources(("algo-2", "algo-1"), "algo-2"))
    assert job_token(job) == job_token(other)
    assert job_token(job) != job_token(replace(job, hyperparameters={"lr": 2}))
    alone = replace(job, resources=Resources())
    assert job_token(alone) != job_token(alone)


def test_the_token_is_read_from_where_the_request_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(bucket: str, key: str, target: str) -> None:
        Path(target).write_text(f"{bucket} {key}".rjust(64))

    monkeypatch.setattr("boto3.client", Mock(return_value=Mock(download_file=download)))
    job = Environment(Folders(tmp_path), framework={TOKEN_FILE: "s3://bucket/a/token"}, resources=TWO)
    assert job_token(job) == b"bucket a/token".rjust(64)
    brought = tmp_path / "token"
    brought.write_bytes(b"1" * 64)
    assert job_token(replace(job, framework={TOKEN_FILE: str(brought)})) == b"1" * 64


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), (b"short", "has 5 bytes, fewer than 16")])
def test_a_token_that_is_none_ends_the_job(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    job = Environment(Folders(tmp_path), framework={TOKEN_FILE: str(tmp_path / "token")}, resources=TWO)
    with pytest.raises(LaunchError, match=f"the job's token .* {said}"):
        job_token(job)


# ---- hosts whose scheduler tells their names and the first one's address ---------------------------------------------


def scheduled(tmp_path: Path, number: int, script: str, port: int, names: str = "node7 node9", **more: str) -> Started:
    """Start a launcher among those of a scheduler, whose names cannot be looked up."""
    place = {"SMPKIT_HOSTS": names, "SMPKIT_FIRST_HOST": "127.0.0.1", "SMPKIT_PORT": str(port)}
    more |= {**place, "SLURM_NODEID": str(number)}
    return start(tmp_path, number, script, 0, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "names"), [(start, HOSTS), (scheduled, ["node7", "node9"])], ids=["named", "scheduled"]
)
def test_two_hosts_form_one_world(tmp_path: Path, begin: Callable[..., Started], names: list[str]) -> None:
    script = ALL_REDUCE + "print(os.environ['SM_HOSTS'], os.environ['GLOO_SOCKET_IFNAME'])"
    with free_ports() as port:
        told = ends([begin(tmp_path, number, script, port) for number in range(2)])
    for rank, (code, out, err) in enumerate(told):
        assert code == 0, err
        assert out == f'[rank {rank}] {names[rank]} {rank} 2.0\n[rank {rank}] ["{names[0]}","{names[1]}"] lo\n'


def test_an_interface_that_no_host_has_gives_way_to_that_of_the_launchers(tmp_path: Path) -> None:
    """SDK v3's local mode says `ethwe`, and gloo would find no address."""
    script = "import os; print(os.environ['GLOO_SOCKET_IFNAME'])"
    with free_ports() as port:
        told = ends([scheduled(tmp_path, number, script, port, SMPKIT_INTERFACE="ethwe") for number in range(2)])
    assert [out for _, out, _ in told] == ["[rank 0] lo\n", "[rank 1] lo\n"]
    assert "this host has no network interface `ethwe`: `lo` is used" in told[0][2]


@pytest.mark.parametrize(("present", "absent"), [(0, "node9"), (1, "node7")])
def test_a_scheduled_host_that_never_comes_is_named(tmp_path: Path, present: int, absent: str) -> None:
    with free_ports() as port:
        [(status, _, err)] = ends([scheduled(tmp_path, present, "", port, SMPKIT_START_SECONDS="1")])
    assert status == 1
    assert re.search(rf"node[79] waited 1 s for {absent}", err)


def test_a_stop_while_hosts_meet_is_no_failure_of_its_own(tmp_path: Path) -> None:
    """A job that is preempted before its hosts have met is queued again, as later."""
    with free_ports() as port:
        process = scheduled(tmp_path, 0, "", port)
        knock(port + 1, b"").close()
        process.send_signal(signal.SIGTERM)
        [(status, _, err)] = ends([process])
    assert (status, err) == (143, "Stopped before the ranks were started\n")


def test_scheduled_hosts_of_another_job_stay_out(tmp_path: Path) -> None:
    """The token is the job's: who is told another one is no host of it, whatever index it claims."""
    tokens = [tmp_path / f"token-{number}" for number in range(2)]
    for number, path in enumerate(tokens):
        path.write_text(f"{number}" * 64)
    with free_ports() as port:
        found = ends(
            [scheduled(tmp_path, n, "", port, SMPKIT_START_SECONDS="3", token=str(tokens[n])) for n in range(2)]
        )
    assert [status for status, _, _ in found] == [1, 1]
    assert "node9 to come; somebody at 127.0.0.1 does not know this job's token" in found[0][2]
