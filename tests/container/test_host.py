"""The launcher's loop against watchers that misbehave; the well-behaved ones are in tests/end_to_end."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit_container.console import Console
from smpkit_container.host import run_host
from smpkit_container.outcome import Outcome, Timeouts

SHORT = Timeouts(start=60.0, settle=0.3, ask=0.1, answer=0.1, end=0.3, grace=0.5, leave=60.0)
"""Short only where nothing else must happen meanwhile."""

WATCHER = """
import os, socket, sys, time, json, signal
def say(kind, **values):
    connection.sendall(json.dumps({"type": kind, **values}).encode() + b"\\n")
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["SMPKIT_LAUNCHER"])
ends = [os.pipe() for _ in range(4)]
socket.send_fds(connection, [json.dumps({"type": "hello", "rank": 0, "local_rank": 0}).encode() + b"\\n"],
                [reading for reading, _ in ends])
for reading, _ in ends:
    os.close(reading)
welcome = connection.recv(65536)
say("start", pid=os.getpid())
"""


STOPPED = WATCHER.replace('"rank": 0,', '"rank": 0, "pid": os.getpid(),').replace(
    'say("start", pid=os.getpid())',
    "import subprocess; child = subprocess.Popen(['true'], close_fds=True); say('start', pid=child.pid)",
)


def run(tmp_path: Path, source: str, ranks: int = 1, timeouts: Timeouts = SHORT) -> tuple[Outcome, str]:
    err = io.BytesIO()
    outcome = run_host(
        [sys.executable, "-c", source],
        program=["train.py", "--log", ":"],
        ranks=range(ranks),
        folder=tmp_path,
        environ=os.environ,
        variables={"GREETING": "hello"},
        console=Console(io.BytesIO(), err, terminal=False, colour=False),
        timeouts=timeouts,
    )
    return outcome, err.getvalue().decode()


def test_ranks_that_never_start_are_given_up_on(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome, _ = run(tmp_path, "import time; time.sleep(600)", ranks=2, timeouts=replace(SHORT, start=1.0, end=60.0))
    assert outcome.missing == (0, 1)
    assert outcome.late
    assert outcome.launcher_status == -signal.SIGTERM
    assert time.monotonic() - began < 300


def test_launcher_that_ignores_everything_is_killed(tmp_path: Path) -> None:
    source = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('words'); time.sleep(600)"
    outcome, _ = run(tmp_path, source, timeouts=replace(SHORT, start=1.0, leave=0.3))
    assert outcome.launcher_status in (-signal.SIGKILL, -signal.SIGTERM)
    assert outcome.missing == (0,)


def test_words_of_a_launcher_that_fails_are_kept(tmp_path: Path) -> None:
    outcome, shown = run(tmp_path, "import sys; print('to stdout', flush=True); sys.exit('no such option')")
    assert outcome.launcher_status == 1
    assert outcome.launcher_output.splitlines() == ["to stdout", "no such option"]
    assert shown == ""


def test_rank_that_survives_sigkill_is_given_up_on(tmp_path: Path) -> None:
    """A process in an uninterruptible wait (a dead network disk) cannot be killed; the run ends all the same."""
    began = time.monotonic()
    outcome, _ = run(
        tmp_path, WATCHER + "os.write(ends[2][1], b'{'); time.sleep(600)", timeouts=replace(SHORT, leave=0.3)
    )
    assert time.monotonic() - began < 300
    assert [end.status for end in outcome.ends] == [None]
    assert not outcome.clean


def test_a_rank_on_a_busy_machine_is_given_time_to_say_where_it_is(tmp_path: Path) -> None:
    source = (
        WATCHER
        + """
os.write(ends[2][1], b'{')  # it has failed, and goes on
connection.recv(65536)  # asked where
time.sleep(1.5)
os.write(ends[3][1], b'here')
say("exit", status=1, seconds=0.0)
connection.recv(100)
"""
    )
    outcome, _ = run(tmp_path, source, timeouts=replace(SHORT, answer=60.0))
    assert [(end.status, end.stack) for end in outcome.ends] == [(1, "here")]


def test_watcher_that_dies_took_its_rank_along(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, WATCHER + "os.kill(os.getpid(), 9)")
    assert [end.status for end in outcome.ends] == [-signal.SIGKILL]


def test_watcher_that_is_stopped_is_woken_with_a_word(tmp_path: Path) -> None:
    """The rank ends, and only its watcher could tell; the run waited for it without end."""
    source = (
        STOPPED
        + "child.wait(); os.kill(os.getpid(), signal.SIGSTOP); say('exit', status=0, seconds=0.0); connection.recv(100)"
    )
    outcome, shown = run(tmp_path, source, timeouts=replace(SHORT, watcher=0.2))
    assert outcome.clean
    assert shown == "rank 0 ended 0.2 s ago, and its watcher is stopped or hangs: woke it\n"


def test_watcher_that_is_stopped_before_the_launcher_has_looked_is_woken_too(tmp_path: Path) -> None:
    """The rank is gone, and waited for, when the launcher hears of its start."""
    source = (
        STOPPED.replace("say('start'", "child.wait(); say('start'")
        + "os.kill(os.getpid(), signal.SIGSTOP); say('exit', status=0, seconds=0.0); connection.recv(100)"
    )
    outcome, shown = run(tmp_path, source, timeouts=replace(SHORT, watcher=0.2))
    assert outcome.clean
    assert "its watcher is stopped or hangs: woke it" in shown


def test_watcher_that_hangs_fails_the_run_with_a_word(tmp_path: Path) -> None:
    outcome, shown = run(
        tmp_path, STOPPED + "connection.recv(100); time.sleep(600)", timeouts=replace(SHORT, watcher=0.2)
    )
    assert "rank 0 ended 0.2 s ago" in shown
    assert [end.headline for end in outcome.ends] == [
        "the process ended, and its watcher, which was stopped or hung, did not say how"
    ]


def test_script_and_variables_are_handed_to_the_rank(tmp_path: Path) -> None:
    """mpirun would give every host the variables of the first, and both launchers read arguments of the script."""
    source = WATCHER + "print(welcome.decode()); say('exit', status=0, seconds=0.0); connection.recv(100)"
    outcome, _ = run(tmp_path, source)
    assert outcome.clean
    assert '"program": ["train.py", "--log", ":"], "variables": {"GREETING": "hello",' in outcome.launcher_output


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    run(tmp_path, "pass")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)] == before


def test_command_that_cannot_be_started_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    console = Console(io.BytesIO(), io.BytesIO(), terminal=False, colour=False)
    with pytest.raises(FileNotFoundError):
        run_host(
            ["no-such-program-anywhere"],
            program=[],
            ranks=range(1),
            folder=tmp_path,
            environ={},
            variables={},
            console=console,
            timeouts=SHORT,
        )
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
