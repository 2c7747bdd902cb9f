"""Communicators are made at `smp.init`, in one order; those of messages, however a script made the default group."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed's, which its types hide

import smpkit.torch as smp
from smpkit.errors import DeadlineError, RemoteError, UsageError
from smpkit.torch.core.devices import backends
from smpkit.torch.core.runtime import state
from smpkit.torch.distributed import init as initialize
from smpkit.torch.distributed.groups import Groups
from smpkit.torch.distributed.init import message_groups
from tests.torch.steps import on_ranks

CPU = torch.device("cpu")


@on_ranks(4)
def test_groups_are_connected_in_one_order_each_once() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1, "ddp": True})
    assert initialize._world is not None
    seen = []

    def note(tensor: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        if async_op:  # what meets nccl; on the hosts, they have met before
            seen.append(tuple(dist.get_process_group_ranks(group)))
        return all_reduce(tensor, group=group, async_op=async_op)

    all_reduce = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", note):
        initialize._world.groups.warm_up(state.process_groups, CPU)
    pipeline, replicas = [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))][smp.rank()]
    assert seen == [(0, 1, 2, 3), pipeline, replicas]  # MP is PP here; DP is RDP


@pytest.mark.parametrize("is_scripts", [True, False])
def test_the_timeout_of_a_default_group_that_the_script_made_stays(is_scripts: bool) -> None:
    if is_scripts:
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore(), timeout=timedelta(seconds=77))
    try:
        for seconds in (77, 88):
            smp.init({"timeout_seconds": seconds})
        world: Any = dist.group.WORLD
        assert world._get_backend(CPU).options._timeout == timedelta(seconds=77 if is_scripts else 88)
    finally:
        smp.shutdown()
        if is_scripts:
            dist.destroy_process_group()


@on_ranks(2, meets=False, timeout=60)
def test_a_rank_that_does_not_come_to_a_connection_is_named() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1, "ddp": True, "timeout_seconds": 3})
    assert initialize._world is not None
    if smp.rank() == 1:
        time.sleep(6)  # alive, and elsewhere
        return
    with pytest.raises((DeadlineError, RemoteError), match=r"(?s)the connection of.* rank 1"):
        initialize._world.groups.warm_up(state.process_groups, CPU)


def test_a_gpu_that_does_not_answer_is_named() -> None:
    groups = Groups(cast("Any", None), 0, timedelta(seconds=0.05), single_host=True)
    work = SimpleNamespace(is_completed=lambda: False)
    with (
        mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 5]),
        pytest.raises(DeadlineError, match=r"rank 0 waited 0 s in the connection of X for rank 5"),
    ):
        groups._wait_for_gpu(cast("Any", work), "the connection of X", cast("Any", None))


@on_ranks(3)
def test_groups_of_messages_are_made_by_their_own_ranks_where_a_script_has_bound_the_default_group() -> None:
    """Two of three ranks make them."""
    dist.init_process_group("gloo")
    smp.init({"ddp": True})
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    if dist.get_rank() < 2:
        seen, new_group = [], dist.new_group

        def note(*args: Any, **kwargs: Any) -> Any:
            seen.append(world.bound_device_id)
            return new_group(*args, **kwargs)

        with mock.patch.object(dist, "new_group", note):
            group, _ = message_groups((0, 1))
        assert seen == [None, None]
        if dist.get_rank() == 0:
            group.send([torch.ones(1)], 1, 0).wait()
        else:
            group.recv([found := torch.zeros(1)], 0, 0).wait()
            assert found.item() == 1
    assert str(world.bound_device_id) == "cuda:0"
    world.bound_device_id = None  # there is no such device here


@pytest.mark.parametrize("name", ["NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_variables_that_make_messages_wait_for_each_other_are_refused(name: str) -> None:
    backends.refuse_one_queue(torch.device("cuda"), {})
    with pytest.raises(UsageError, match=f"{name} is '1'"):
        backends.refuse_one_queue(torch.device("cuda"), {name: "1"})


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without nccl")
def test_messages_start_before_what_is_computed_and_take_little_of_the_gpu() -> None:
    options = cast("Any", backends.message_options("nccl", timedelta(seconds=7)))
    assert options.is_high_priority_stream
    assert options.config.max_ctas == 8
    assert options._timeout == timedelta(seconds=7)
    assert backends.message_options("gloo", timedelta(seconds=7)) is None
