from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.distributed.init import shutdown
from smpkit.torch.distributed.signals import on_stop, stop_requested
from tests.forked import Script
from tests.torch.steps import on_ranks

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    shutdown()
    assert signal.getsignal(signal.SIGTERM) == before


@contextmanager
def started(script: str, tmp_path: Path, *, fresh: bool = False) -> Iterator[Script | subprocess.Popen[str]]:
    """Run a script that waits to be stopped, and send it SIGTERM once it says `ready`; with `fresh` as users do."""
    path = tmp_path / "script.py"
    # Not printed: the signal could come while that lasts, in which a callback must not print. And many short sleeps:
    # Python notes a signal that comes just before a sleep only after it.
    head, tail = (
        "import os, time\nfrom smpkit.torch.distributed.signals import on_stop",
        "os.write(1, b'ready\\n')\nfor _ in range(6000): time.sleep(0.1)",
    )
    path.write_text(f"{head}\n{script}\n{tail}\n")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process: Script | subprocess.Popen[str]
    if fresh:
        process = subprocess.Popen([sys.executable, str(path)], env=environment, text=True, **pipes)
    else:
        process = Script(path, env=environment, reads=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        yield process
    finally:
        process.kill()
        process.communicate()


def stop_a_script(script: str, tmp_path: Path, *, fresh: bool = False) -> tuple[int | None, str, str]:
    """Return exit code and both outputs of a script that is stopped."""
    with started(script, tmp_path, fresh=fresh) as process:
        out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def test_callbacks_run_in_order_and_the_process_ends_with_0(tmp_path: Path) -> None:
    script = "on_stop(lambda: print('first'))\n@on_stop\ndef save():\n    print('second')"
    assert stop_a_script(script, tmp_path) == (0, "first\nsecond\n", "")


def test_a_repeated_signal_does_not_start_the_callback_again(tmp_path: Path) -> None:
    script = "on_stop(lambda: (print('saving', flush=True), input(), print('saved')))"
    with started(script, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        out, _ = process.communicate("go on\n", timeout=150)
    assert (process.returncode, out) == (0, "saved\n")


@pytest.mark.parametrize(
    "leave",
    ["on_stop(lambda: print('saved'))", "while not smp.stop_requested(): ready()\nprint('saved'); sys.exit()"],
    ids=["on_stop", "stop_requested"],
)
def test_a_signal_that_is_repeated_while_the_script_ends_does_not_kill_it(leave: str, tmp_path: Path) -> None:
    """After `smp.shutdown()`, which is the last that smpkit does at exit."""
    script = f"""
import atexit, os, signal, sys, time
import smpkit.torch as smp
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
ready = lambda said=[]: said or said.append(os.write(1, b'ready\\n'))
smp.init()
{leave}
"""
    assert stop_a_script(script, tmp_path, fresh=True)[:2] == (0, "saved\n")


def test_a_callback_that_raises_ends_the_process_with_its_traceback_after_the_others(tmp_path: Path) -> None:
    script = "def bad():\n    raise OSError('disk full')\non_stop(bad)\non_stop(lambda: print('other'))"
    code, out, err = stop_a_script(script, tmp_path)
    assert (code, out) == (1, "other\n")
    assert err.strip().endswith("OSError: disk full")


def test_an_earlier_handler_runs_afterwards(tmp_path: Path) -> None:
    theirs = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('theirs'), sys.exit(7)))"
    script = f"{theirs}\non_stop(lambda: print('ours'))"
    assert stop_a_script(script, tmp_path) == (7, "ours\ntheirs\n", "")


def test_shutdown_gives_the_signal_back() -> None:
    def theirs(number: int, frame: FrameType | None) -> None: ...

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        on_stop(lambda: None)
        assert signal.getsignal(signal.SIGTERM) != theirs
        shutdown()
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_cannot_register() -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(UsageError, match="must be called in the main thread"):
        pool.submit(on_stop, lambda: None).result()


def test_the_two_ways_exclude_each_other() -> None:
    smp.init()
    assert not stop_requested()
    with pytest.raises(UsageError, match="exclude each other"):
        on_stop(lambda: None)
    shutdown()
    smp.init()
    on_stop(lambda: None)
    with pytest.raises(UsageError, match="exclude each other"):
        stop_requested()


@on_ranks(4)
def test_all_ranks_hear_of_a_stop_at_the_same_step() -> None:
    smp.init({"ddp": True})
    for step in range(5):
        assert stop_requested() == (step == 4)
        if smp.rank() == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
