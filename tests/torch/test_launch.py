"""`smp.launch`: ranks from a test, a script or a notebook."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.launch import RankFailed
from tests.deadlines import until
from tests.leftovers import processes_with


def sums(number: int, *, factor: int) -> tuple[int, int, torch.Tensor, str | None]:
    smp.init({"ddp": True})
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.ones(2, 1)), num_workers=1)  # which starts a process
    found = sum(batch[0].sum().item() for batch in loader)
    return smp.rank(), sum(smp.allgather(number * factor)), torch.full((2,), found), os.environ.get("MINE")


def test_every_rank_returns_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "as it is now")
    first, second = smp.launch(sums, 3, ranks=2, factor=2)
    assert (first[:2], second[:2]) == ((0, 12), (1, 12))
    assert torch.equal(second[2], torch.full((2,), 2.0))
    assert first[3] == "as it is now"
    [(_, _, _, given)] = smp.launch(sums, 3, ranks=1, factor=2, env={"MINE": "another"})
    assert given == "another"


def reaches_the_store(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, int(os.environ["MASTER_PORT"]))) == 0


def test_ranks_meet_at_the_loopback_address_alone() -> None:
    """Anybody on the network could read and write their store. All of 127.0.0.0/8 leads to `lo`."""
    assert smp.launch(reaches_the_store, "127.0.0.1", ranks=1) == [True]
    assert smp.launch(reaches_the_store, "127.0.0.2", ranks=1) == [False]


def test_what_is_defined_in_a_function_is_sent() -> None:
    offset = 5

    def local(number: int) -> int:
        return int(os.environ["RANK"]) + number + offset

    assert smp.launch(local, 1, ranks=2) == [6, 7]
    with pytest.raises(UsageError, match=r"smp\.launch cannot send its function or arguments"):
        smp.launch(local, threading.Lock(), ranks=1)
    with pytest.raises(UsageError, match=r"smp\.launch was asked for 0 ranks"):
        smp.launch(local, 1, ranks=0)


def fails(how: str) -> Any:
    smp.init({"ddp": True, "timeout_seconds": 20})
    smp.barrier()  # or the first rank could end before the other has connected to it
    if smp.rank() == 1:
        if how == "raises":
            raise ValueError("bad batch")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(60)
        if how == "returns":
            return Path(__file__).open()
    return None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r'--- rank 1: Traceback[\s\S]*test_launch.py", line \d+, in fails[\s\S]*ValueError: bad batch'),
        ("dies", r"--- rank 1: died without a traceback \(exit code -9\)"),
        ("hangs", r"--- rank 1: still running after 2 s"),
        ("returns", r"--- rank 1: Traceback[\s\S]*cannot pickle"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_traceback(how: str, said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        smp.launch(fails, how, ranks=2, timeout=2 if how == "hangs" else 100)


SCRIPT = """
import os, time
import smpkit.torch as smp

class Mine:
    value = 3

def train(what):
    os.write(1, f"ready {os.environ['RANK']}\\n".encode())  # at once, or lines of two ranks mix
    time.sleep(what)
    return Mine.value

if __name__ == "__main__":
    print(smp.launch(train, 0, ranks=2), flush=True)
    smp.launch(train, 600, ranks=2)
"""


def test_ranks_of_a_script_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environ, mark = {**os.environ, "SMPKIT_TEST_MARK": str(tmp_path)}, f"SMPKIT_TEST_MARK={tmp_path}"
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as it:
        try:
            assert it.stdout is not None
            seen = [it.stdout.readline().strip() for _ in range(5)]
            assert seen[2] == "[3, 3]"
            assert sorted(seen[:2]) == sorted(seen[3:]) == ["ready 0", "ready 1"]
            assert len(processes_with(mark)) >= 4
        finally:
            it.kill()
    until(lambda: not processes_with(mark), "the end of the ranks")


def saves(folder: str) -> None:
    smp.init({"ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(2000, 2000))  # which takes longer to write than to end a process
    smp.save_checkpoint(folder, "last", model=model, blocking=False)


def test_a_save_in_the_background_is_complete_when_ranks_have_returned(tmp_path: Path) -> None:
    smp.launch(saves, str(tmp_path), ranks=2)
    assert (tmp_path / "newest").read_text().strip() == "last_partial"
