from __future__ import annotations

import os
import subprocess
import sys

import pytest

from smpkit_container.channel import Inbox, packed
from smpkit_container.rank import name_ranks


def test_without_a_launcher_it_says_who_starts_it() -> None:
    command = [sys.executable, "-m", "smpkit_container.rank"]
    environ = {name: value for name, value in os.environ.items() if name != "SMPKIT_LAUNCHER"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "SMPKIT_LAUNCHER is not set: this program is started by `python -m smpkit_container`\n"


def test_ranks_of_mpirun_get_torchruns_names() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    name_ranks(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [environ[name] for name in names] == ["3", "4", "1", "2"]


def test_names_that_are_set_stay() -> None:
    environ = {"RANK": "7", "OMPI_COMM_WORLD_RANK": "3"}
    name_ranks(environ)
    assert environ["RANK"] == "7"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_are_whole_however_they_arrive(size: int) -> None:
    data = packed("exit", status=-9, seconds=1.5) + packed("leave")
    inbox = Inbox()
    messages = [m for start in range(0, len(data), size) for m in inbox.feed(data[start : start + size])]
    assert messages == [{"type": "exit", "status": -9, "seconds": 1.5}, {"type": "leave"}]
