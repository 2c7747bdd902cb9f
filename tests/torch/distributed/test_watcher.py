"""A rank that waits inside a call of CUDA wakes when another one fails; nccl is played by what only an abort ends."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType  # torch.distributed's, which its types hide

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.core.devices import backends
from smpkit.torch.distributed import deadline, watcher
from smpkit.torch.distributed import init as initialize
from smpkit.torch.distributed.deadline import waiting
from tests.deadlines import SECONDS, facts, until
from tests.ranks import run_ranks
from tests.torch.distributed.conftest import Start
from tests.torch.distributed.test_deadline import outcome, stories
from tests.torch.steps import on_ranks


class Spinning:
    """What nccl is to a rank whose GPU waits for one that is gone."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def abort(self) -> None:
        self.ended.set()

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> ErrorType:
        return ErrorType.SUCCESS

    def item(self) -> None:
        """Return when the kernel has ended, as `Tensor.item()` does, with garbage."""
        assert self.ended.wait(SECONDS), "nobody ended the kernel"


def begin(look_seconds: float = 0.1) -> Spinning:
    """Start a job whose ranks are connected by nccl."""
    backend = Spinning()
    backends.device_backends = lambda group: [backend]  # type: ignore[list-item]
    watcher._POLL_SECONDS = look_seconds  # type: ignore[misc]
    smp.init({"ddp": True, "timeout_seconds": 600})
    return backend


@pytest.mark.parametrize(
    "how", ["barrier", "nothing", "NCCL communicator was aborted on rank 0.", "CUDA error: unspecified launch failure"]
)
@on_ranks(2, meets=False)
def test_a_rank_that_waits_for_its_gpu_hears_which_rank_failed_and_why(how: str) -> None:
    backend = begin()
    if smp.rank() == 1:
        deadline.report_failure(ValueError("the loss is not finite"))
        assert backend.ended.is_set()
        facts().wait(["heard"])  # or its end would tell as well
        return
    backend.item()
    assert deadline.failed()

    def collective() -> None:
        with waiting("the reduction of gradients", [1]):
            if how != "nothing":
                raise RuntimeError(how)

    text = outcome(smp.barrier if how == "barrier" else collective)
    facts().set("heard", "")
    assert text.startswith("RemoteError: rank 1 failed: ValueError: the loss is not finite")


@on_ranks(2, meets=False)
def test_a_thread_that_fails_the_job_wakes_all() -> None:
    backend = begin()
    if smp.rank() == 0:
        failures: Any = deadline.current_failures()
        failures.fail_all_ranks(UsageError("ranks took different ways"))
        assert backend.ended.is_set()
    backend.item()
    who = "RemoteError: rank 0 failed: " if smp.rank() else ""
    assert outcome(smp.barrier).startswith(f"{who}UsageError: ranks took different ways")


@on_ranks(2, meets=False)
def test_a_rank_that_loses_another_ends_its_own_kernels() -> None:
    backend = begin(look_seconds=SECONDS)  # nobody watches: who notices it ends its own kernels
    if smp.rank() == 1:
        facts().wait(["told"])
        return

    def receive() -> None:
        with waiting("recv_from(rank 1)", [1]):
            raise RuntimeError("Connection closed by peer")

    text = outcome(receive)
    facts().set("told", "")
    assert text.startswith("RemoteError: rank 0 lost rank 1 in recv_from(rank 1)")
    assert backend.ended.is_set()


@on_ranks(2)
def test_an_interrupt_ends_kernels() -> None:
    backend = begin(look_seconds=SECONDS)
    deadline._previous_hook = lambda *error: None
    deadline._on_uncaught(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert backend.ended.is_set()


def one_has_an_error(error: str | None) -> str:
    """Return what rank 0 says when nccl has this error there, or tells none because smpkit itself is wrong."""
    backend = begin()
    if smp.rank() == 1:
        facts().wait(["told"])
        return "late"
    vars(backend)["get_error"] = lambda: ErrorType.__members__[error] if error else 1 / 0
    backend.item()
    text = outcome(smp.barrier)
    facts().set("told", "")
    return text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("TIMEOUT", "DeadlineError: rank 0 waited 600 s in an operation between GPUs (default_pg) for rank 1"),
        ("COMM_ERROR", "RemoteError: rank 0 lost rank 1 in an operation between GPUs (default_pg)"),
    ],
)
def test_an_error_of_nccl_becomes_a_verdict(error: str, words: str) -> None:
    told = run_ranks(one_has_an_error, 2, error, env={backends.FLIGHT_RECORD: "/runs/7/nccl_trace_rank_"})[0]
    assert told.startswith(words)
    assert ("from /runs/7/nccl_trace_rank_*" in told) == (error == "TIMEOUT")


def test_a_watcher_that_fails_ends_the_kernels_because_torch_leaves_it_the_last_word() -> None:
    told = run_ranks(one_has_an_error, 2, None)[0]
    assert told.startswith("RemoteError: rank 0 cannot watch its GPU any more: ZeroDivisionError: division by zero")


def num_watchers() -> int:
    return sum(thread.name == "smpkit-watcher" for thread in threading.enumerate())


@on_ranks(2)
def test_there_is_one_watcher_where_nccl_connects_ranks_and_none_elsewhere() -> None:
    for _ in range(2):
        begin()
        smp.init({"ddp": True, "microbatches": 2, "timeout_seconds": 600})  # once more, in the same world
        smp.barrier()
        assert num_watchers() == 1
        smp.shutdown()
        until(lambda: num_watchers() == 0, "the end of the watcher")
    backends.device_backends = lambda group: []
    smp.init({"ddp": True})
    assert num_watchers() == 0


def test_kernels_end_before_a_process_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Spinning()
    monkeypatch.setattr(backends, "device_backends", lambda group: [backend])
    try:
        smp.init({})
        failures: Any = deadline.current_failures()
        failures.has_failed = True
        initialize._at_exit()
        assert backend.ended.is_set()
        assert dist.is_initialized()  # nothing waited for the others
    finally:
        monkeypatch.undo()
        smp.shutdown()


def test_an_abort_that_hangs_holds_up_neither_the_others_nor_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, other, over = Spinning(), Spinning(), threading.Event()
    monkeypatch.setattr(stuck, "abort", lambda: over.wait(SECONDS))
    monkeypatch.setattr(backends, "device_backends", lambda group: [stuck, other])
    monkeypatch.setattr(deadline, "_ABORT_SECONDS", 0.2)
    deadline.abort([object()])  # type: ignore[list-item]
    assert other.ended.is_set()
    over.set()


@pytest.mark.parametrize(
    ("launcher", "set_before", "expected"),
    [
        ("torchrun", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "2"),
        ("torchrun", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3"),
        ("Open MPI", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "1"),
        ("Open MPI", {"NCCL_ASYNC_ERROR_HANDLING": "1"}, None),
        ("Open MPI", {}, "2"),
    ],
)
def test_torch_leaves_the_last_word_to_the_watcher(
    launcher: str, set_before: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    for name in (*names, "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_SOCKET_IFNAME", backends.FLIGHT_RECORD):
        monkeypatch.setenv(name, "")  # or nothing would undo what is set below
        monkeypatch.delenv(name)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    backends.prepare("cpu:gloo,cuda:nccl", launcher, single_host=False)
    assert os.environ.get(names[0]) == expected
    assert os.environ[names[2]] == "1"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
    assert backends.FLIGHT_RECORD not in os.environ
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("SMPKIT_SHARED_GPU_NCCL", "1")
    monkeypatch.setenv("SMPKIT_RUN_DIR", "/runs/7")
    backends.prepare("cpu:gloo,cuda:nccl", launcher, single_host=True)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert os.environ[backends.FLIGHT_RECORD] == "/runs/7/nccl_trace_rank_"


# --- whole processes, because a rank's death and its uncaught exception are the point ---------------------------------

SPINS = """
    import smpkit.torch as smp
    from tests.torch.distributed.test_watcher import begin
    backend = begin()
    if smp.rank() == 1:
        smp.recv_from(0)
        raise ValueError('the mask is empty')
    smp.send("I am about to wait", 1)
    backend.item()
    raise RuntimeError("NCCL communicator was aborted on rank 0.")
"""


@pytest.mark.parametrize("agent", [True, False], ids=["agent", "rank 0 serves"])
def test_the_traceback_of_an_aborted_call_ends_with_the_verdict(agent: bool, start: Start) -> None:
    ranks = start(SPINS, 2, agent=agent)
    told = stories(ranks)
    assert "RemoteError: rank 1 failed: ValueError: the mask is empty\n" in told[0]
    assert "backend.item()" in told[0] or "raise RuntimeError" in told[0]  # where the script was
    assert [rank.returncode for rank in ranks] == [1, 1]


SERVER_DIES = """
    import os, signal
    import smpkit.torch as smp
    from tests.torch.distributed.test_watcher import begin
    backend = begin()
    smp.barrier()
    if smp.rank() == 0:
        smp.recv_from(1)
        os.kill(os.getpid(), signal.SIGKILL)
    smp.send("I am about to wait", 0)
    backend.item()
    raise RuntimeError("NCCL communicator was aborted on rank 1.")
"""


def test_a_server_that_dies_is_named(start: Start) -> None:
    told = stories(start(SERVER_DIES, 2, agent=False))
    assert "RemoteError: rank 1 lost rank 0, which served the store: " in told[1]
