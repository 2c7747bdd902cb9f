"""Who waits for whom is named when a wait fails, whether a rank is late, has failed, has ended or is dead."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

import smpkit.torch as smp
from smpkit.torch.distributed import deadline
from smpkit.torch.distributed.deadline import waiting
from smpkit.torch.distributed.failure_store import FailureStore, RankStatus
from tests.deadlines import facts, let_judge, wait_for_notes, wait_shortly
from tests.forked import Script
from tests.ranks import run_ranks
from tests.torch.distributed.conftest import Start
from tests.torch.steps import on_ranks, train_step, wrap


def outcome(call: Any) -> str:
    """Return the error of a call; one that waited for the default's half hour would be ended by `run_ranks`."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def given_up(call: Any) -> str:
    """Call as rank 0, and tell those that come late."""
    told = outcome(call)
    facts().set("given up", "")
    return told


def waited_seconds(message: str, where: str) -> float:
    """Return for how long rank 0 says that it waited."""
    found = re.match(rf"DeadlineError: rank 0 waited (\d+(?:\.\d)?) s {re.escape(where)}", message)
    assert found is not None, message
    return float(found[1])


def reduce() -> None:
    group = smp.get_dp_process_group()
    with waiting("the reduction of gradients", group):
        dist.all_reduce(torch.ones(8), group=group)


CALLS: dict[str, Any] = {
    "barrier of WORLD": smp.barrier,
    "allgather of WORLD": lambda: smp.allgather(1),
    "recv_from(rank 2)": lambda: smp.recv_from(2),
    "send to rank 2": lambda: smp.send("hello", 2),
    "the reduction of gradients": reduce,  # a collective of torch
}


@pytest.mark.parametrize("what", CALLS)
@on_ranks(3, meets=False)
def test_a_deadline_names_who_waited_for_whom_in_what(what: str) -> None:
    smp.init({"ddp": True})
    if smp.rank() == 2:
        facts().wait(["given up"])  # this rank comes late
        return
    let_judge(0, [1])
    wait_shortly()
    message = given_up(CALLS[what]) if smp.rank() == 0 else outcome(CALLS[what])
    assert waited_seconds(message, f"in {what} for rank 2") >= 0  # no time, where rank 1 gave up before it
    assert "timeout_seconds" in message


def all_receive_in_a_ring() -> str:
    smp.init({"ddp": True})
    others = range(1, smp.size())
    let_judge(0, others)
    if smp.rank() == 0:
        facts().wait([f"rank {rank} waits" for rank in others])
        wait_shortly(2)
    else:
        facts().set(f"rank {smp.rank()} waits", "")
    following = (smp.rank() + 1) % smp.size()
    return outcome(lambda: smp.recv_from(following))


def test_ranks_that_wait_for_each_other_are_in_a_deadlock_and_say_where() -> None:
    for message in run_ranks(all_receive_in_a_ring, 2):
        assert waited_seconds(message, "in recv_from(rank 1) for rank 1") >= 1
        assert "; meanwhile rank 1 waited in recv_from(rank 0) for rank 0; a deadlock of rank 0 in " in message
        place = r"in test_deadline\.py, line \d+ \(`return outcome\(lambda: smp\.recv_from\(following\)\)`\)"
        assert re.search(rf"rank 0 {place} and rank 1 {place}\nhint: every rank makes the same calls in", message)


def test_a_ring_of_ranks_is_woken_by_the_first_whose_deadline_passes() -> None:
    """Rank 2 waits for rank 0, which closed only its connection to the rank that it waited for itself."""
    for message in run_ranks(all_receive_in_a_ring, 3):
        assert re.search(r"; a deadlock of rank 0 in .* and rank 1 in .* and rank 2 in ", message)


@pytest.mark.parametrize("call", ["state_dict", "save_checkpoint"])
@on_ranks(2, meets=False)
def test_a_call_of_all_ranks_that_one_makes_alone_is_a_deadlock_with_both_lines(call: str, tmp_path: Path) -> None:
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), pipeline_parallel_degree=2, microbatches=2)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters()))
    train_step(model, torch.ones(4, 2))
    let_judge(0, [1])
    if smp.rank() == 1:
        facts().set("rank 1 waits", "")
        message = outcome(lambda: train_step(model, torch.ones(4, 2)))
    else:
        facts().wait(["rank 1 waits"])
        wait_shortly(3)
        if call == "state_dict":
            message = outcome(lambda: model.state_dict())  # noqa: PLW0108 - the line that is named
        else:
            message = outcome(lambda: smp.save_checkpoint(tmp_path, tag="a", model=model, optimizer=optimizer))
    assert "; a deadlock of " in message
    assert re.search(rf"rank 0 in test_deadline\.py, line \d+ \(`.*{call}\(", message)
    assert re.search(r"rank 1 in test_deadline\.py, line \d+ \(`.*train_step\(", message)
    assert "is one of these under `if smp.rank() == ...`?" in message


RECEIVING = [(0, 1), (1, 2), (2, 3), (3, 1)]
STEP, SENT, MESSAGE = "the inputs of the step", "send to rank 1", "forward of microbatch 1 (float32 [2] for `a`)"


@pytest.mark.parametrize(
    ("first", "second", "began", "expected"),
    [
        (STEP, "allgather of WORLD", 0, [0, 1]),
        (STEP, "allgather of WORLD", 10, []),  # rank 1 was slow, and came when rank 0 had given up
        ("allgather of WORLD", "allgather of WORLD", 0, []),  # which may transfer much
        (SENT, "recv_from(rank 0)", 0, []),
        (SENT, "send to rank 0", 0, [0, 1]),
        ("backward of microbatch 0 (float32 [2])", MESSAGE, 0, []),  # which may be on its way
        (MESSAGE, "barrier of WORLD", 0, [0, 1]),
    ],
)
def test_what_may_be_on_its_way_is_no_deadlock(first: str, second: str, began: float, expected: list[int]) -> None:
    waits = [
        RankStatus(0, "timed out", first, [1, 2], began=1, ended=9),
        RankStatus(1, "waited", second, [0], began=began, ended=10.5),
        RankStatus(2, "waited", STEP, [1], began=1, ended=9),
    ]
    found = deadline._circle_of_waits({status.rank: status for status in waits})
    assert [status.rank for status in found] == expected


def test_a_deadlock_may_be_of_many_ranks_and_beside_this_one() -> None:
    waits = {rank: RankStatus(rank, "waited", f"recv_from(rank {peer})", [peer], ended=9) for rank, peer in RECEIVING}
    assert [status.rank for status in deadline._circle_of_waits(waits)] == [1, 2, 3]


@on_ranks(4, meets=False)
def test_a_chain_of_waits_names_the_rank_at_its_end() -> None:
    """Rank 0 waits for rank 1, and that for rank 2, which are as well as rank 0 is: what all lack is rank 3."""
    smp.init({"ddp": True})
    if smp.rank() == 3:
        facts().wait(["given up"])  # this rank comes late
        return
    let_judge(0, [1, 2])
    if smp.rank() > 0:
        wait_for_notes([0])  # rank 0 is the first whose deadline passes
    wait_shortly()
    message = (given_up if smp.rank() == 0 else outcome)(lambda: smp.recv_from(smp.rank() + 1))
    waits = [f"rank {rank} waited in recv_from(rank {rank + 1}) for rank {rank + 1}" for rank in (1, 2)]
    assert waited_seconds(message, f"in recv_from(rank 1) for rank 3; meanwhile {', '.join(waits)}\n") >= 1


# --- whole processes, because a rank's death and its uncaught exception are the point ---------------------------------


def stories(ranks: Sequence[Script]) -> list[str]:
    return [rank.communicate(timeout=120)[1] for rank in ranks]


SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
import smpkit.torch as smp
{first}
smp.init({{"ddp": True, "timeout_seconds": 600}})
smp.barrier()
if smp.rank() == {rank}:
    {does}
{then}
"""
FAILS = 'raise ValueError("the learning rate is negative")'
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


def script(rank: int, does: str, then: str = "smp.barrier()", first: str = "") -> str:
    """Return a script in which one rank does something between two barriers, or before something else."""
    return SCRIPT.format(rank=rank, does=does, then=then, first=first)


@pytest.mark.parametrize("failing", [1, 0], ids=["other", "server"])
def test_the_other_ranks_say_which_rank_failed_first_and_why(failing: int, start: Start) -> None:
    told = stories(start(script(failing, FAILS), 3, agent=False))  # before their deadline
    assert told[failing].strip().endswith("ValueError: the learning rate is negative")
    for rank, story in enumerate(told):
        if rank != failing:
            assert f"RemoteError: rank {failing} failed: ValueError: the learning rate is negative" in story


def test_a_wait_of_torch_that_breaks_as_a_rank_fails_ends_with_that_ranks_error(start: Start) -> None:
    """Nothing of smpkit is around this wait, and torch says of it no more than `Connection closed by peer`."""
    waits = script(1, FAILS, then="dist.all_reduce(torch.ones(1))")
    told = stories(start(waits, 2, agent=True))  # far sooner than their deadline
    assert "RemoteError: rank 1 failed: ValueError: the learning rate is negative" in told[0]
    assert told[1].strip().endswith("ValueError: the learning rate is negative")


def test_a_collective_that_torch_calls_by_itself_names_who_waited_for_whom(start: Start) -> None:
    """As `fully_shard` does in a backward that the other replicas leave out: gloo said no more than `Timed out`."""
    first = "from tests.deadlines import let_judge, wait_shortly; let_judge(0, [1])"
    waits = script(
        0, "wait_shortly()", then="smp.barrier() if smp.rank() else dist.all_reduce(torch.ones(1))", first=first
    )
    waited = (
        "rank 0 waited 1.0 s in torch's all_reduce for rank 1; meanwhile rank 1 waited in barrier of WORLD for rank 0"
    )
    for story in stories(start(waits, 2, agent=True)):
        assert f"DeadlineError: {waited}" in story


@pytest.mark.parametrize(("leaving", "agent"), [(1, True), (1, False), (0, False)], ids=["agent", "other", "server"])
def test_a_rank_whose_script_ends_before_the_others_is_named_as_that(leaving: int, agent: bool, start: Start) -> None:
    ranks = start(script(leaving, "sys.exit(3)"), 2, agent=agent)
    told = stories(ranks)  # far sooner than their deadline
    stayed = 1 - leaving
    assert [ranks[leaving].returncode, ranks[stayed].returncode] == [3, 1]
    assert f"RemoteError: rank {stayed} lost rank {leaving} in barrier of WORLD: its script ended" in told[stayed]
    place = r"in script\.py, line 9 \(`smp.barrier\(\)`\)"
    hint = r"\[rank\d\]: hint: every rank makes the same calls"
    assert re.search(rf"its script ended without the call of rank {stayed} {place}\n{hint}", told[stayed])
    assert told[leaving] == ""


def test_a_rank_that_ends_after_the_store_says_nothing(start: Start) -> None:
    # Until nothing listens any more where the store was.
    ranks = start(script(1, "os.read(0, 1)", then=""), 2, agent=False, reads=True)
    ranks[0].wait(timeout=120)
    told = ranks[1].communicate("x", timeout=120)[1]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told == ""


def test_a_rank_that_dies_without_a_word_is_named(start: Start) -> None:
    judge = "from tests.deadlines import let_judge; let_judge(0, [2])"
    ranks = start(script(1, DIES, first=judge), 3, agent=True)
    told = stories(ranks)  # far sooner than their deadline
    assert ranks[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert "RemoteError: rank 0 lost rank 1 in barrier of WORLD" in told[rank]


def test_a_dead_rank_that_served_the_store_is_named(start: Start) -> None:
    told = stories(start(script(0, DIES), 2, agent=False))
    assert "RemoteError: rank 1 lost rank 0 in barrier of WORLD" in told[1]
    assert "nobody listens at 127.0.0.1:" in told[1]
    assert len(told[1].splitlines()) < 12  # where the script was and why it ends, without smpkit's own frames
    assert 'script.py", line ' in told[1]
    assert "[c10d]" not in told[1]  # the store's client, asked for what is gone, says so in a hundred lines


STANDS_STILL = """
    import os, signal, time
    import smpkit.torch as smp
    from smpkit.torch.distributed import failure_store as board
    from tests.deadlines import wait_shortly
    board._SILENCE_SECONDS = 1.0
    smp.init({"ddp": True})
    server = smp.allgather(os.getpid())[0]
    if smp.rank() == 0:
        time.sleep(600)  # not in the barrier: it might be through before it is stopped, and let rank 1 through
    wait_shortly()
    os.kill(server, signal.SIGSTOP)
    smp.barrier()
"""


def test_a_rank_that_serves_the_store_and_stands_still_is_named(start: Start) -> None:
    """`Store.check` has no deadline of its own: without ours rank 1 would wait for its answer for ever."""
    told = start(STANDS_STILL, 2, agent=False)[1].communicate(timeout=120)[1]
    assert "RemoteError: rank 1 lost rank 0 in barrier of WORLD after " in told
    assert "; the store in rank 0 could tell why, but it has not answered for 1 s" in told


@on_ranks(2)
def test_errors_that_are_not_of_communication_pass_unchanged() -> None:
    smp.init({"ddp": True})
    for error in (ValueError("connection"), RuntimeError("a mere bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, waiting("nothing", [1 - smp.rank()]):
            raise error
        assert caught.value is error


def test_a_server_that_is_being_killed_is_not_asked_and_one_that_has_ended_is_named_by_its_address() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
    store = FailureStore(client, 1, 2, timedelta(seconds=5), list, server="rank 0", serves_store=False)
    # The kernel accepts connections for it until it is dead, and its client would log a page about the request.
    with socket.create_server(("127.0.0.1", 0)) as dying:
        store._address = dying.getsockname()
        closing = threading.Thread(target=lambda: dying.accept()[0].close())  # noqa: PLW0108 - in the thread
        closing.start()
        with pytest.raises(dist.DistStoreError, match=r"^nobody listens at 127\.0\.0\.1:"):
            store.read("key")
        closing.join()
    store._address = ("127.0.0.1", server.port)
    assert store.read("key") is None
    # Its client knows only that a socket was closed, and says so with a page of C++ frames.
    store.write("key", "text")  # the server was seen just now, so nobody asks whether it is still there
    port = server.port
    del server
    with pytest.raises(dist.DistStoreError, match=f"^nobody listens at 127.0.0.1:{port} any more$"):
        store.read("key")
