"""The process group of simulated devices gives what gloo gives, as work on streams."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smpkit.testing import simulated_device
from tests.device.on_sim import ORDERS, naming, on_sim, run_on_sim


def begin(seconds: float = 60) -> tuple[int, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,sim:sim", rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    return rank, size


def each_collective(device: str) -> dict[str, Tensor]:
    """Return what every collective leaves behind on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Tensor] = {}

    def own(length: int = 6) -> Tensor:
        return torch.arange(float(length), device=device) * 10**rank

    for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("product", dist.ReduceOp.PRODUCT)):
        found[f"all_reduce {name}"] = x = own()
        dist.all_reduce(x, op)
    found["all_reduce of bfloat16"] = x = torch.full((6,), rank + 1.5, device=device, dtype=torch.bfloat16)
    dist.all_reduce(x)
    found["broadcast"] = x = own()
    dist.broadcast(x, src=size - 1)
    found["reduce"] = x = own()
    dist.reduce(x, dst=0)
    if rank:
        del found["reduce"]  # what other ranks keep is not promised
    gathered = [torch.empty(6, device=device) for _ in range(size)]
    dist.all_gather(gathered, own())
    found["all_gather"] = torch.cat(gathered)
    found["all_gather_into_tensor"] = x = torch.empty(6 * size, device=device)
    dist.all_gather_into_tensor(x, own())
    found["reduce_scatter_tensor"] = x = torch.empty(3, device=device)
    dist.reduce_scatter_tensor(x, own(3 * size))
    found["all_to_all_single"] = x = torch.empty(2 * size, device=device)
    dist.all_to_all_single(x, own(2 * size))
    lists = [torch.empty(6, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(own(), lists, dst=0)
    if lists:
        found["gather"] = torch.cat(lists)
    found["scatter"] = x = torch.empty(6, device=device)
    dist.scatter(x, [own() + i for i in range(size)] if rank == 0 else None, src=0)
    found["send and receive"] = x = torch.empty(6, device=device)
    if rank % 2 == 0:
        dist.send(own(), rank + 1)
        dist.recv(x, rank + 1)
    else:
        dist.recv(x, rank - 1)
        dist.send(own(), rank - 1)
    found["batch"] = x = torch.empty(6, device=device)
    ring = [dist.P2POp(dist.isend, own() + 1, (rank + 1) % size), dist.P2POp(dist.irecv, x, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    dist.barrier()
    return found


def compare() -> None:
    rank, size = begin()
    assert dist.get_backend_config() == "cpu:gloo,sim:sim"
    expected = each_collective("cpu")
    for order in ORDERS:
        with naming(str(order)), simulated_device.no_races(*order):
            found = each_collective("sim")
            for name, value in expected.items():
                assert torch.equal(found[name].cpu(), value), (name, found[name], value)
            mean = torch.full((4,), float(rank), device="sim")
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            assert mean.tolist() == [(size - 1) / 2] * 4
            outs = [torch.empty(2, device="sim") for _ in range(size)]
            dist.all_to_all(outs, [torch.full((2,), float(10 * rank + i), device="sim") for i in range(size)])
            assert torch.cat(outs).tolist() == [10.0 * other + rank for other in range(size) for _ in range(2)]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_collectives_give_what_gloo_gives(size: int) -> None:
    run_on_sim(compare, size=size)


def overlapped(wait: bool) -> list[str]:
    simulated_device.races()
    x = torch.ones(1000, device="sim")
    work = dist.all_reduce(x, async_op=True)
    y = torch.ones(1000, device="sim") * 3  # goes on beside it
    if wait:
        work.wait()
    x.mul_(2)
    total = float((x + y).sum())
    if wait:
        assert total == 7000
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed()
    return [f"{race.second.operator}, {race.first.operator}" for race in simulated_device.races()]


@on_sim(size=2)
def test_a_collective_not_waited_for_is_a_race() -> None:
    begin()
    assert overlapped(wait=True) == []
    assert "aten::mul, all_reduce" in overlapped(wait=False)


def queries() -> list[bool]:
    rank, _ = begin()
    simulated_device.set_policy("random", 5)
    found = []
    x = torch.ones(1000, device="sim")
    for _ in range(20):
        work = dist.irecv(x, 0) if rank else dist.isend(x, 1)
        assert work is not None
        while not work.is_completed():
            found.append(False)
        found.append(True)
        work.wait()
    return found


def test_answers_to_queries_repeat() -> None:
    first, second = (run_on_sim(queries, size=2) for _ in range(2))
    assert first == second
    assert False in first[0]


def crossed(one_at_a_time: bool) -> str:
    rank, _ = begin()
    groups = [dist.new_group(backend="sim", timeout=timedelta(seconds=3 if one_at_a_time else 60)) for _ in range(2)]
    simulated_device.configure(one_communicator_at_a_time=one_at_a_time)
    x, y = torch.ones(4, device="sim"), torch.ones(4, device="sim")
    for group, value in zip(groups if rank else reversed(groups), (x, y), strict=True):
        dist.all_reduce(value, group=group, async_op=True)
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"{x.tolist()}"


def test_communicators_in_another_order_on_each_rank_need_both_at_once() -> None:
    assert run_on_sim(crossed, False, size=2) == ["[2.0, 2.0, 2.0, 2.0]"] * 2
    found = run_on_sim(crossed, True, size=2)
    assert any("one communicator at a time" in text for text in found) or all("failed" in text for text in found)


@on_sim(size=2)
def test_abort_ends_what_waits() -> None:
    rank, _ = begin()
    dist.all_reduce(torch.ones(1, device="cpu"))  # a rank that leaves before this breaks the other's connection
    if rank:
        return
    dist.all_reduce(torch.ones(4, device="sim"), async_op=True)
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("sim"))
    start = time.monotonic()
    backend.abort()
    with pytest.raises(RuntimeError, match=r"all_reduce .* was aborted"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="was aborted"):
        dist.all_reduce(torch.ones(4, device="sim"))
    assert time.monotonic() - start < 10


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model: nn.Module, weights: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8, device="cpu").to("sim")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def data_parallel() -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(made().to("sim"))
    train(model, list(model.parameters()))
    return [each.detach().cpu() for each in model.parameters()]


def sharded() -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = made().to("sim")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model, list(model.parameters()))
    return [each.full_tensor().detach().cpu() for each in model.parameters()]  # type: ignore[attr-defined]


def train_all() -> list[list[Tensor]]:
    begin()
    found = []
    for order in ORDERS:
        for kind in (data_parallel, sharded):
            with naming(f"{kind.__name__} under {order}"), simulated_device.no_races(*order):
                found.append(kind())
    return found


def test_torch_s_own_data_parallelism_runs_without_races() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(4, 8)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for trainings in run_on_sim(train_all, size=2):
        for found in trainings:
            torch.testing.assert_close(found, [each.detach() for each in model.parameters()])
