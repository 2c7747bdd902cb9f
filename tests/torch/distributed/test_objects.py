from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.distributed import objects as comm
from tests.deadlines import facts
from tests.torch.distributed.test_deadline import outcome
from tests.torch.steps import MANY_SECONDS, on_ranks

GRID = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 4}


class Thing:
    """Pickles by the name of its class, as a script's own objects do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def objects() -> dict[str, Any]:
    torch.manual_seed(0)
    base, square = torch.randn(4, 6), torch.randn(3, 3)
    return {
        "float": torch.randn(3),
        "bool": torch.tensor([True, False, True]),
        "bfloat16": torch.randn(5).to(torch.bfloat16),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
        "int64": torch.arange(5),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "square": square,
        "square, transposed": square.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "grad": torch.ones(2, requires_grad=True),
        "none": None,
        "number": 3,
        "text": "héllo",
        "nested": {"list": [torch.ones(1), (torch.zeros(2), {"deep": torch.ones(3)})], 3: {4, 5}},
        "thing": Thing(torch.full((2,), 7.0)),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        equal = torch.equal(left.to_dense(), right.to_dense()) if left.is_sparse else bool((left == right).all())
        kind = (type(left), left.dtype, left.shape, left.requires_grad)
        return equal and kind == (type(right), right.dtype, right.shape, right.requires_grad)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Thing):
        return same(left.tensor, right.tensor)
    return bool(left == right)


@on_ranks(2)
def test_every_kind_of_object_arrives_as_it_was() -> None:
    smp.init({"ddp": True})
    own = objects()
    if smp.rank() == 0:
        for value in own.values():
            smp.send(value, 1)
        smp.send(own, 1)
    else:
        arrived = {name: smp.recv_from(0) for name in own}
        assert [name for name, value in own.items() if not same(value, arrived[name])] == []
        assert same(own, smp.recv_from(0)), "all at once"


@on_ranks(2)
def test_shared_tensors_travel_once_and_share_memory_again() -> None:
    smp.init({"ddp": True})
    if smp.rank() == 0:
        tensor = torch.arange(4.0)
        tied = nn.Linear(2, 2, bias=False)
        head = nn.Linear(2, 2, bias=False)
        head.weight = tied.weight
        smp.send({"once": tensor, "again": tensor, "other": torch.arange(4.0)}, 1)
        smp.send(nn.Sequential(tied, head).state_dict(), 1)
        return
    first, second = smp.recv_from(0), smp.recv_from(0)
    first["once"][0] = 9
    assert first["once"] is first["again"]
    assert first["other"][0].item() == 0
    assert second["0.weight"].data_ptr() == second["1.weight"].data_ptr(), "tied weights"
    assert second["0.weight"].untyped_storage().nbytes() == 16, "it owns its memory"


@on_ranks(4)
def test_trap_16_broadcast_is_called_by_the_sender_and_received_by_recv_from() -> None:
    smp.init(GRID)
    got: list[Any] = []
    if smp.rank() == 2:
        smp.broadcast({"x": torch.ones(2)}, smp.WORLD)
        smp.broadcast("second", smp.WORLD)
    else:
        got += [smp.recv_from(2)["x"].tolist(), smp.recv_from(2, smp.RankType.WORLD_RANK)]
    if smp.pp_rank() == 1:  # cluster: pipelines are (0, 2) and (1, 3)
        smp.broadcast(f"from {smp.rank()}", smp.PP_GROUP)
    else:
        got.append(smp.recv_from(1, smp.RankType.PP_RANK))
    if smp.tp_rank() == 0:
        smp.broadcast(f"tp {smp.rank()}", smp.CommGroup.TP_GROUP)
    else:
        got.append(smp.recv_from(0, smp.RankType.TP_RANK))
    expected = [
        [[1.0, 1.0], "second", "from 2"],
        [[1.0, 1.0], "second", "from 3", "tp 0"],
        [],
        [[1.0, 1.0], "second", "tp 2"],
    ]
    assert got == expected[smp.rank()]


@on_ranks(4)
def test_messages_of_one_source_arrive_in_the_order_of_its_calls() -> None:
    smp.init({"ddp": True})
    if smp.rank() == 0:
        smp.broadcast("a", smp.WORLD)
        smp.send("b", 1)
        smp.broadcast("c", smp.DP_GROUP)
        return
    expected = ["a", "b", "c"] if smp.rank() == 1 else ["a", "c"]
    assert [smp.recv_from(0) for _ in expected] == expected


@on_ranks(4)
def test_trap_13_rank_types_count_within_the_senders_group() -> None:
    smp.init(GRID)
    got = []
    for kind in (smp.RankType.TP_RANK, smp.RankType.PP_RANK, smp.RankType.MP_RANK):
        group = smp.state.group(kind.value)
        index = group.index(smp.rank())
        ahead, behind = (index + 1) % len(group), (index - 1) % len(group)
        if index % 2 == 0:
            smp.send((kind.name, smp.rank()), ahead, kind)
            got.append(smp.recv_from(behind, kind))
        else:
            got.append(smp.recv_from(behind, kind))
            smp.send((kind.name, smp.rank()), ahead, kind)
    senders = [(1, 2, 3), (0, 3, 0), (3, 0, 1), (2, 1, 2)][smp.rank()]
    assert got == list(zip(("TP_RANK", "PP_RANK", "MP_RANK"), senders, strict=True))


@on_ranks(4)
def test_allgather_orders_by_rank_in_the_group() -> None:
    smp.init(GRID)
    rank = smp.rank()
    whole = smp.allgather({"rank": rank, "data": torch.full((rank,), float(rank))}, smp.WORLD)
    assert [item["data"].tolist() for item in whole] == [[float(other)] * other for other in range(4)]
    assert smp.allgather(rank, smp.DP_GROUP) == ([0, 1] if rank < 2 else [2, 3])
    assert smp.allgather(None, smp.RDP_GROUP) == [None]
    mine = object()
    assert smp.allgather(mine, smp.RDP_GROUP)[0] is mine


@on_ranks(4)
def test_a_barrier_opens_when_the_last_has_come() -> None:
    smp.init({"ddp": True})
    smp.barrier()
    if smp.rank() == 1:
        time.sleep(0.5)
    before = time.monotonic()
    smp.barrier()
    smp.dp_barrier()
    smp.mp_barrier()
    after = time.monotonic()
    assert after >= max(smp.allgather(before))  # the clock is the machine's, so it is comparable between processes


@on_ranks(4)
def test_wrong_ranks_and_kinds_are_named_with_the_valid_ones() -> None:
    smp.init(GRID)
    itself = f"rank {smp.rank()} names itself"
    for call, text in (
        (lambda: smp.send(1, 4), r"smp\.send: there is no WORLD_RANK 4\nhint: valid are 0 to 3"),
        (lambda: smp.send(1, -1), "no WORLD_RANK -1"),
        (
            lambda: smp.recv_from(2, smp.RankType.TP_RANK),
            r"smp\.recv_from: there is no TP_RANK 2\nhint: valid are 0 to 1",
        ),
        (lambda: smp.send(1, smp.rank()), rf"smp\.send: {itself}"),
        (lambda: smp.recv_from(smp.tp_rank(), smp.RankType.TP_RANK), rf"smp\.recv_from: {itself}"),
        (lambda: smp.send(1, 0, "WORLD_RANK"), r"'WORLD_RANK' is not a rank type\n.*smp\.RankType\.WORLD_RANK"),  # type: ignore[arg-type]
        (lambda: smp.broadcast(1, smp.RankType.TP_RANK), r"is not a group\n.*smp\.CommGroup\.DP_GROUP"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=text):
            call()


MISMATCHES: dict[str, Any] = {
    "barrier and allgather": (
        (smp.barrier, lambda: smp.allgather(1)),
        "rank 0 is in barrier of WORLD, but rank 1 is in allgather of WORLD",
    ),
    "recv_from and barrier": (
        (lambda: smp.recv_from(1), smp.barrier),
        "rank 0 is in recv_from(rank 1), but rank 1 is in barrier of WORLD",
    ),
    "barriers of two groups": (
        (lambda: smp.barrier(smp.WORLD), lambda: smp.barrier(smp.DP_GROUP)),
        "rank 0 is in barrier of WORLD, but rank 1 is in barrier of DP_GROUP",
    ),
    "broadcast by both": (
        (smp.barrier, lambda: smp.broadcast(1, smp.WORLD)),
        "rank 0 is in barrier of WORLD, but rank 1 is in send or broadcast",
    ),
}
"""What each of two ranks calls, and what is said of it."""


@pytest.mark.parametrize("name", MISMATCHES)
@on_ranks(2, meets=False)
def test_calls_that_do_not_fit_are_named_and_not_waited_for(name: str) -> None:
    smp.init({"ddp": True, "timeout_seconds": MANY_SECONDS})
    calls, said = MISMATCHES[name]
    told = outcome(calls[smp.rank()])
    if smp.rank() == 0:
        facts().set("noticed", "")
        assert told.startswith(f"UsageError: {said}")
    else:  # a rank that notices first must not end before the other has read its header, or that sees a lost peer
        facts().wait(["noticed"])


@on_ranks(2)
def test_an_object_that_cannot_be_pickled_leaves_the_stream_in_order() -> None:
    smp.init({"ddp": True})
    if smp.rank() == 1:
        assert smp.recv_from(0) == "after"
        return
    with pytest.raises(Exception, match="pickle"):
        smp.send(lambda: 0, 1)
    smp.send("after", 1)


@on_ranks(2)
def test_tensors_travel_fast_because_they_are_not_pickled() -> None:
    """They are received where they stay, and what is pickled is small."""
    smp.init({"ddp": True})
    if smp.rank() == 0:
        smp.send({"weights": torch.ones(32 * 2**20, dtype=torch.uint8)}, 1)
        return
    with mock.patch.object(comm, "_receive", wraps=comm._receive) as receive:
        weights = smp.recv_from(0)["weights"]
    assert int(weights.sum(dtype=torch.int64)) == 32 * 2**20
    *others, largest = sorted((call.args[0] for call in receive.call_args_list), key=lambda tensor: tensor.nbytes)
    assert largest.data_ptr() == weights.data_ptr()
    assert sum(tensor.nbytes for tensor in others) < 1000
