"""The launcher's loop, with ranks that are real processes and something else in mpirun's place."""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from smpkit_container import console
from smpkit_container import rank as rank_module
from smpkit_container.console import Console
from smpkit_container.supervise import STAND_IN, Host, Outcome, Starter, Timeouts, _Rank, meeting_place

SHORT = Timeouts(start=60.0, settle=0.3, ask=0.1, answer=0.1, end=0.3, grace=0.5, leave=60.0)
"""Short only where nothing else must happen meanwhile."""

MPIRUN = f"""
import os, subprocess
environ = lambda rank: {{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OF_MPIRUN": "yes"}}
ranks = [subprocess.Popen({list(STAND_IN)!r}, env=environ(rank)) for rank in range(2)]
"""
"""Starts two stand-ins."""
WAIT = "raise SystemExit(max(rank.wait() for rank in ranks))"


def run(
    tmp_path: Path, script: str, mpirun: str | None = None, ranks: int = 1, timeouts: Timeouts = SHORT
) -> tuple[Outcome, str]:
    (tmp_path / "train.py").write_text(script)
    out = io.BytesIO()
    place = meeting_place()

    def environ_of(rank: int, theirs: Mapping[str, str]) -> Mapping[str, str]:
        return {**os.environ, **theirs, "RANK": str(rank)}

    outcome = Host(
        range(ranks),
        ["train.py", "--log", ":"],
        tmp_path,
        environ_of,
        place,
        Console(out, out, terminal=False, colour=False),
        timeouts,
        None if mpirun is None else Starter((sys.executable, "-c", mpirun), os.environ),
    ).run()
    shutil.rmtree(place)
    return outcome, out.getvalue().decode()


def test_ranks_that_never_start_are_given_up_on(tmp_path: Path) -> None:
    began = time.monotonic()
    timeouts = replace(SHORT, start=1.0, end=60.0)
    outcome, _ = run(tmp_path, "", "import time; time.sleep(600)", ranks=2, timeouts=timeouts)
    assert outcome.missing == (0, 1)
    assert outcome.late
    assert outcome.mpirun_status == -signal.SIGTERM
    assert time.monotonic() - began < 300


def test_mpirun_that_ignores_everything_is_killed(tmp_path: Path) -> None:
    source = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('words'); time.sleep(600)"
    outcome, _ = run(tmp_path, "", source, timeouts=replace(SHORT, start=1.0, leave=0.3))
    assert outcome.mpirun_status in (-signal.SIGKILL, -signal.SIGTERM)
    assert outcome.missing == (0,)


def test_words_of_mpirun_that_fails_are_kept(tmp_path: Path) -> None:
    outcome, shown = run(tmp_path, "", "import sys; print('to stdout', flush=True); sys.exit('no such option')")
    assert outcome.mpirun_status == 1
    assert outcome.mpirun_output.splitlines() == ["to stdout", "no such option"]
    assert shown == ""


def test_a_rank_has_what_mpirun_set_and_its_stand_in_ends_as_it_does(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['RANK'], os.environ['OF_MPIRUN'], sys.argv); sys.exit(3)"
    outcome, shown = run(tmp_path, script, MPIRUN + WAIT, ranks=2)
    assert [end.status for end in outcome.ends] == [3, 3]
    assert outcome.mpirun_status == 3
    lines = sorted(shown.splitlines())
    assert lines == [f"[rank {rank}] {rank} yes ['train.py', '--log', ':']" for rank in range(2)]


def test_ranks_end_when_mpirun_does(tmp_path: Path) -> None:
    script = "import os, time; open('ready-' + os.environ['RANK'], 'w').close(); time.sleep(20)"
    leave_early = "import time\nwhile not all(os.path.exists(f'ready-{rank}') for rank in range(2)): time.sleep(0.05)"
    outcome, _ = run(tmp_path, script, MPIRUN + leave_early, ranks=2)
    assert [end.stopped for end in outcome.ends] == [True, True]
    assert outcome.mpirun_status == 0


def test_a_rank_that_goes_on_after_the_others_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that hung after the last step, the line said no more than how many steps there had been."""
    monkeypatch.setattr(console, "_LOG_SECONDS", tuple(part / 10 for part in range(1, 3000)))
    script = """
import os, pathlib, time
first = pathlib.Path("first")
if os.environ["RANK"] == "0":
    first.symlink_to(f"/proc/{os.getpid()}")
else:
    while not first.is_symlink() or first.exists():  # until it has been reaped
        time.sleep(0.05)
    time.sleep(1)
"""
    outcome, said = run(tmp_path, script, ranks=2)
    assert outcome.clean
    assert "; 1 of 2 ranks have ended, rank 1 still runs\n" in said


def test_a_rank_that_survives_sigkill_is_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in an uninterruptible wait (a dead network disk) cannot be killed; the run ends all the same."""
    processes = []
    monkeypatch.setattr(_Rank, "reap", lambda rank: processes.append(rank.process))
    outcome, _ = run(tmp_path, "raise ValueError('boo')")
    for process in processes:
        process.wait()
    assert [(end.status, end.headline) for end in outcome.ends] == [(None, "ValueError: boo")]
    assert not outcome.clean


def test_a_rank_on_a_busy_machine_is_given_time_to_say_where_it_is(tmp_path: Path) -> None:
    """The signal that asks comes while the rank is in a call that does not return for a while."""
    script = """
import os, signal, time
if os.environ["RANK"] == "1":
    raise ValueError("boo")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
time.sleep(2)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
time.sleep(600)
"""
    outcome, _ = run(tmp_path, script, ranks=2, timeouts=replace(SHORT, answer=60.0))
    assert outcome.ends[0].stopped
    assert 'train.py", line 7 in <module>' in outcome.ends[0].stack


def test_an_error_that_another_follows_while_it_is_reported_is_told(tmp_path: Path) -> None:
    """DataLoader's signal handler raises when a killed worker's end becomes known: maybe while a rank reports already.

    https://github.com/pytorch/pytorch/issues/28950 has the error that comes first.
    """
    script = """
import signal

def fail(*_):
    raise RuntimeError("DataLoader worker (pid 7) is killed")

class Meanwhile(ConnectionResetError):
    hint = property(lambda self: signal.raise_signal(signal.SIGUSR2))

signal.signal(signal.SIGUSR2, fail)
raise Meanwhile("reset by peer")
"""
    outcome, _ = run(tmp_path, script)
    error = outcome.ends[0].error
    assert error is not None
    assert error.message == "RuntimeError: DataLoader worker (pid 7) is killed"
    assert "reset by peer" in error.traceback


def test_the_error_of_a_forked_child_is_not_in_the_way_of_the_ranks_own(tmp_path: Path) -> None:
    script = """
import os
if os.fork() == 0:
    raise ValueError("child")
os.wait()
raise ValueError("rank")
"""
    outcome, _ = run(tmp_path, script)
    assert outcome.ends[0].headline == "ValueError: rank"


SCRIPTS = {
    "train.py": "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('ready', flush=True); input()",
    "train.sh": "sleep 600 & echo ready; read line",
    "again.py": "import os, sys; os.execv(sys.executable, [sys.executable, 'train.py'])",
}


@pytest.mark.parametrize(
    ("script", "has_signal"),
    [("train.py", True), ("train.sh", True), ("again.py", True), ("train.py", False)],
    ids=["signal", "shell", "exec", "thread"],
)
def test_a_rank_and_what_it_started_die_with_the_launcher(tmp_path: Path, script: str, has_signal: bool) -> None:
    """By a signal that the kernel sends when the other end of the life line is closed, or, as on macOS, by a thread."""
    for name, content in SCRIPTS.items():
        (tmp_path / name).write_text(content)
    number = "" if has_signal else "rank._SIGNAL_OF_DESCRIPTOR = -1; "
    start = f"import os, sys; from smpkit_container import rank; {number}rank.main(['{script}'], os.environ)"
    theirs, ours = os.pipe()
    report, stack = os.pipe(), os.pipe()
    held = (report[1], stack[1], theirs)
    environ = {**os.environ, rank_module.LINK: ",".join(map(str, held))}
    with subprocess.Popen(
        [sys.executable, "-c", start], cwd=tmp_path, env=environ, pass_fds=held, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        for descriptor in held:
            os.close(descriptor)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.close(ours)
        assert process.wait(60) == -signal.SIGKILL
        has_ended, _, _ = select.select([process.stdout], [], [], 20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert has_ended, "`sleep` is left, and holds the pipe open"
    os.close(report[0])
    os.close(stack[0])


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    run(tmp_path, "pass")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)] == before


def test_a_stop_is_heard_where_nobody_reads_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `| less` while it shows the first page: SIGTERM used to wait until somebody read on."""
    monkeypatch.setattr(console, "_WAIT_SECONDS", 0.2)
    stop = "import os, signal, threading\nthreading.Timer(1, os.kill, (os.getppid(), signal.SIGTERM)).start()\n"
    (tmp_path / "train.py").write_text(f"{stop}while True: print('x' * 4096)\n")
    reading, writing = os.pipe()
    place = meeting_place()

    def read() -> None:
        while os.read(reading, 1 << 16):
            pass

    reader = threading.Timer(30, read)  # the test ends, come what may
    reader.start()
    with os.fdopen(writing, "wb", buffering=0) as stream:
        unread = Console(stream, stream, terminal=False, colour=False)
        program = (range(1), ["train.py"], tmp_path, lambda *_: os.environ, place)
        outcome = Host(*program, unread, replace(SHORT, end=60.0)).run()
    assert reader.is_alive(), "somebody had to read"
    reader.cancel()
    os.close(reading)
    shutil.rmtree(place)
    assert outcome.stop_signal in (signal.SIGTERM, signal.SIGPIPE)
    assert outcome.ends[0].exit_code in (128 + signal.SIGTERM, 128 + signal.SIGKILL)


def test_what_cannot_be_started_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    console = Console(io.BytesIO(), io.BytesIO(), terminal=False, colour=False)
    starter, place = Starter(("no-such-program-anywhere",), {}), meeting_place()
    with pytest.raises(FileNotFoundError):
        Host(range(1), ["x.py"], tmp_path, lambda rank, theirs: theirs, place, console, SHORT, starter).run()
    shutil.rmtree(place)
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


def test_without_a_launcher_a_rank_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "smpkit_container.rank", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{rank_module.LINK} is not set: this program is started by `python -m smpkit_container`\n"
