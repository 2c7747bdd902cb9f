"""`smpkit run --pdb RANK`: one rank's debugger on a real (pseudo) terminal, and the others, which wait."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = """
import smpkit.torch as smp

def middle(value):
    breakpoint()
    return value

smp.init()
middle(41)
print("together", smp.allgather(smp.rank()), flush=True)
if smp.rank() == 1:
    bad = "batch"
    raise ValueError("bad " + bad)
smp.barrier()
"""

JOB = """
entry_point: train.py
distribution:
  torch_distributed: {enabled: true, processes_per_host: 2}
  smdistributed: {modelparallel: {enabled: true, parameters: {ddp: true, timeout_seconds: 2}}}
"""


class Terminal:
    """The other side of the terminal at which somebody sits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.seen = ""
        self._read = 0

    def until(self, text: str, seconds: float = 60) -> None:
        """Wait for a text behind the one that was waited for before."""
        deadline = time.monotonic() + seconds
        while text not in self.seen[self._read :]:
            assert time.monotonic() < deadline, f"`{text}` did not come: {self.seen}"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self.seen += os.read(self._descriptor, 65536).decode()
        self._read = self.seen.index(text, self._read) + len(text)

    def type(self, line: str) -> None:
        os.write(self._descriptor, f"{line}\n".encode())


@contextlib.contextmanager
def started(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Terminal]]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(JOB)
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).with_name("smpkit")), "run", "job.yaml", *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SMPKIT_SETTLE_SECONDS": "0.5"}
    try:
        with subprocess.Popen(
            command, cwd=folder, env=environ, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process, Terminal(ours)
            finally:
                process.kill()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
def test_one_rank_is_debugged_while_the_others_wait(tmp_path: Path) -> None:
    with started(tmp_path, "--pdb", "1") as (process, terminal):
        terminal.until("(Pdb rank 1)")
        assert "train.py(" in terminal.seen
        time.sleep(4)  # twice the deadline of the waits between ranks
        terminal.type("p value + 1")
        terminal.until("42")
        terminal.type("c")
        terminal.until("rank 1: ValueError: bad batch")
        terminal.until("(Pdb rank 1)")
        time.sleep(3)
        terminal.type("p bad * 2")
        terminal.until("'batchbatch'")
        terminal.type("q")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1, out + err
    assert sorted(re.findall(r"^\[rank \d\] together .*", out, re.MULTILINE)) == [
        "[rank 0] together [0, 1]",
        "[rank 1] together [0, 1]",
    ]
    assert "ValueError: bad batch" in err
    assert "rank 1, exit 1" in err
    assert "Deadline" not in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pdb", "2"], "`--pdb 2`: the job has the ranks 0 to 1"),
        (["--pdb", "0", "--docker"], "`--pdb` cannot be given beside `--docker`"),
    ],
)
def test_what_cannot_be_debugged_is_refused(tmp_path: Path, options: list[str], said: str) -> None:
    with started(tmp_path, *options) as (process, _):
        out, err = process.communicate(timeout=60)
    assert (process.returncode, said in err) == (2, True), out + err
