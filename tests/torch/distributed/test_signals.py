from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType

import pytest

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.distributed.init import shutdown
from smpkit.torch.distributed.signals import stop_requested
from tests.torch.steps import on_ranks

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    shutdown()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_repeated_while_the_script_ends_does_not_kill_it(tmp_path: Path) -> None:
    """After `smp.shutdown()`, which is the last that smpkit does at exit."""
    path = tmp_path / "script.py"
    path.write_text("""
import atexit, os, signal
import smpkit.torch as smp
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
smp.init()
print(smp.stop_requested(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print(smp.stop_requested())
""")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "False\nTrue\n")


def test_shutdown_gives_the_signal_back() -> None:
    def theirs(number: int, frame: FrameType | None) -> None: ...

    smp.init()
    before = signal.signal(signal.SIGTERM, theirs)
    try:
        assert not stop_requested()
        assert signal.getsignal(signal.SIGTERM) != theirs
        shutdown()
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def sleep(began: Event) -> None:
    began.set()
    time.sleep(60)


def test_processes_that_the_script_forks_end_at_the_signal() -> None:
    """`with multiprocessing.Pool()`, as in `datasets.map(num_proc=...)`, waited for ended workers without end."""
    smp.init()
    assert not stop_requested()
    context = multiprocessing.get_context("fork")
    began = context.Event()
    child = context.Process(target=sleep, args=(began,), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, to fork where there are threads
        child.start()
    try:
        assert began.wait(20)
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "this process still notes it"
    finally:
        child.kill()
        child.join()


def test_another_thread_cannot_be_the_first_to_ask() -> None:
    smp.init()
    with ThreadPoolExecutor() as pool, pytest.raises(UsageError, match="must be called in the main thread"):
        pool.submit(stop_requested).result()


@on_ranks(4)
def test_all_ranks_hear_of_a_stop_at_the_same_step() -> None:
    smp.init({"ddp": True})
    for step in range(5):
        assert stop_requested() == (step == 4)
        if smp.rank() == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
