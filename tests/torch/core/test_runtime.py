"""`smp.init()` and `smp.shutdown()`: one process, groups of ranks, and what is left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import smpkit.torch as smp
from smpkit.errors import ConfigError, DeadlineError, UsageError
from smpkit.torch.distributed.init import extra_group
from tests.models import CASES, Case
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, train_step
from tests.train import Trace, Way, same, train

pytestmark = pytest.mark.usefixtures("world")
QUERIES = ["rank", "size", "local_rank", "local_size"] + [
    f"{kind}_{what}" for kind in ("mp", "dp", "tp", "pp", "rdp") for what in ("rank", "size")
]


# --- one process ------------------------------------------------------------------------------------------------------


def test_a_plain_process_is_a_world_of_one() -> None:
    assert not smp.is_initialized()
    smp.init()
    assert smp.is_initialized()
    assert {name: getattr(smp, name)() for name in QUERIES} == {
        name: 0 if name.endswith("rank") else 1 for name in QUERIES
    }
    assert not smp.is_tracing()
    assert dist.get_world_size() == 1
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=smp.get_dp_process_group())
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_before_init_says_to_call_it(name: str) -> None:
    with pytest.raises(UsageError, match=r"smp.init\(\) has not been called"):
        getattr(smp, name)()


def test_the_environment_overrides_the_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"microbatches": 4}')
    smp.init({"microbatches": 2, "timeout_seconds": 30})
    assert (smp.state.cfg.microbatches, smp.state.timeout.total_seconds()) == (4, 30)


def test_trap_4_init_takes_the_dict_whether_it_comes_first_or_later() -> None:
    smp.init()
    smp.init({"microbatches": 4})
    smp.init()
    assert smp.state.cfg.microbatches == 4


def test_trap_4_after_wrapping_only_the_same_configuration_is_taken_again() -> None:
    smp.init({"microbatches": 4})
    world = smp.get_world_process_group()
    smp.DistributedModel(torch.nn.Linear(1, 1))
    smp.init({"microbatches": 4})
    smp.init()
    with pytest.raises(UsageError, match=r"microbatches 4 -> 2"):
        smp.init({"microbatches": 2})
    assert smp.get_world_process_group() is world
    assert smp.state.model is not None
    assert smp.state.cfg.microbatches == 4


def test_degrees_that_do_not_fit_the_world_are_a_config_error_and_leave_nothing_behind() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_degree"):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    assert not smp.is_initialized()
    assert not dist.is_initialized()


def test_nccl_without_a_gpu_falls_back_to_gloo_and_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.warns(UserWarning, match="gloo is used"):
        smp.init({"ddp": True, "ddp_dist_backend": "nccl"})
    assert "gloo" in dist.get_backend()


def test_a_backend_without_ddp_gets_one_notice() -> None:
    with pytest.warns(UserWarning, match="nccl|ddp") as notices:
        smp.init({"ddp_dist_backend": "nccl"})
    texts = [str(notice.message) for notice in notices]
    assert [text for text in texts if "ddp_dist_backend" in text] == [next(t for t in texts if "no effect" in t)]


def test_the_configuration_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="smpkit"):
        smp.init({"microbatches": 4})
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Configuration parameters:"
    assert "  microbatches: 4" in lines
    assert not any(line.startswith("  _") for line in lines)


# --- several ranks ----------------------------------------------------------------------------------------------------

GRID = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "microbatches": 4}
KINDS = ("mp", "dp", "tp", "pp", "rdp")


def check_groups(size: int) -> None:
    smp.init(GRID)
    rank = int(os.environ["RANK"])
    assert (smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (rank, size, rank, size)
    for kind in KINDS:
        ranks, group = getattr(smp, f"get_{kind}_group")(), getattr(smp, f"get_{kind}_process_group")()
        assert dist.get_process_group_ranks(group) == ranks
        assert len(ranks) == getattr(smp, f"{kind}_size")()
        assert ranks[getattr(smp, f"{kind}_rank")()] == rank
        tensor = torch.tensor([2.0**rank])
        dist.all_reduce(tensor, group=group)
        assert int(tensor) == sum(2**member for member in ranks)


@pytest.mark.parametrize("size", [4, 8])
def test_groups_of_a_grid_work_and_are_the_meshs(size: int) -> None:
    run_ranks(check_groups, size, size)


@on_ranks(4)
def test_trap_13_get_tp_group_is_a_list_and_the_group_names_are_attributes() -> None:
    smp.init(GRID)
    assert smp.get_tp_group() == ([0, 1] if smp.rank() < 2 else [2, 3])
    for name in ("WORLD", "MP_GROUP", "DP_GROUP", "TP_GROUP", "PP_GROUP", "RDP_GROUP"):
        assert getattr(smp, name) is getattr(smp.CommGroup, name)
    for name in ("WORLD_RANK", "MP_RANK", "DP_RANK", "TP_RANK", "PP_RANK", "RDP_RANK"):
        assert isinstance(getattr(smp.RankType, name), smp.RankType)


@on_ranks(4, hosts=2)
def test_two_hosts_have_local_ranks_of_their_own() -> None:
    smp.init({"ddp": True})
    assert (smp.local_rank(), smp.local_size()) == (int(os.environ["RANK"]) % 2, 2)


@on_ranks(2)
def test_groups_with_the_same_ranks_are_one_group() -> None:
    smp.init({"ddp": True})
    assert smp.get_dp_process_group() is smp.get_world_process_group()
    assert smp.get_tp_process_group() is smp.get_pp_process_group()


@on_ranks(4)
def test_trap_4_other_degrees_remake_the_groups_while_no_model_is_wrapped() -> None:
    smp.init({"ddp": True})
    rank = smp.rank()
    assert smp.get_dp_group() == [0, 1, 2, 3]
    if rank == 3:
        time.sleep(0.5)  # what it said of the configuration before must not count for this one
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    assert smp.get_pp_group() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert smp.get_dp_group() == [rank % 2, rank % 2 + 2]
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=smp.get_pp_process_group())
    assert int(tensor) == 2


@on_ranks(2)
def test_independent_replicas_are_warned_of_by_rank_0_only() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        smp.init()
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert len(texts) == 1 - smp.rank()
    for text in texts:
        assert "2 data-parallel ranks: the replicas train independently" in text
        assert '`smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})` cuts the model' in text


@on_ranks(2)
def test_ranks_with_different_configurations_are_told_which() -> None:
    rank = int(os.environ["RANK"])
    message = f"microbatches: is {1 + rank} on rank {rank} but {2 - rank} on rank {1 - rank}"
    with pytest.raises(ConfigError, match=message):
        smp.init({"microbatches": 1 + rank, "ddp": True})


@on_ranks(2)
def test_a_default_group_of_the_script_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo")
    smp.init({"ddp": True})
    assert smp.get_world_process_group() is dist.group.WORLD
    smp.barrier()
    assert smp.size() == 2
    smp.shutdown()
    assert dist.is_initialized()


@on_ranks(4)
def test_ranks_meet_though_the_script_has_made_groups_of_some_of_them() -> None:
    # Torch names a group by how many a process has, too: ranks with unlike many waited for each other in the next.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for alone in (0, 1):
        dist.new_group([alone])
        smp.init({"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2, "timeout_seconds": 20})
        assert smp.allgather(rank, smp.CommGroup.PP_GROUP) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert smp.allgather(rank, smp.CommGroup.DP_GROUP) == [rank % 2, rank % 2 + 2]
        smp.shutdown()


def train_in_a_group_for_gpus_only(case: Case, way: Way) -> Trace:
    dist.init_process_group("cuda:gloo")  # as "nccl" is: it takes no tensors of the hosts
    return train(case, way)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_default_group_for_gpus_only_is_no_hindrance(replicas: int) -> None:
    same(CASES["Sequential"], Way(pipeline=2, replicas=replicas), by=train_in_a_group_for_gpus_only)


@on_ranks(4, meets=False)
def test_who_does_not_come_to_a_group_is_named() -> None:
    smp.init({"ddp": True, "timeout_seconds": 2})
    if smp.rank() % 2:
        time.sleep(4)  # alive, and elsewhere
        return
    said = r"rank 0 waited 2 s in the group of ranks 0, 1 and 2 \(shared parameters\) for rank 1"
    with pytest.raises(DeadlineError, match=said if smp.rank() == 0 else None):
        extra_group((0, 1, 2))


@on_ranks(2)
def test_a_default_group_that_contradicts_the_launcher_is_refused() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    message = f"torch.distributed was initialised as rank 0 of 1, but torchrun says rank {rank} of 2"
    with pytest.raises(UsageError, match=message):
        smp.init()


@on_ranks(2)
def test_a_default_group_without_a_launcher_gives_the_places() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    smp.init({"ddp": True})
    assert (smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (rank, 2, rank, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
@on_ranks(4)
def test_worlds_that_are_over_leave_no_threads() -> None:
    """Not even with the last model still in a variable."""
    counts: list[int] = []
    for _ in range(5):
        smp.init({"pipeline_parallel_degree": 2, "ddp": True})
        model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        train_step(model, torch.ones(2, 2))
        smp.shutdown()
        end = time.monotonic() + 10  # one that has been joined is still listed for a moment
        while (found := gloo_threads()) > max(counts[1:2], default=found) and time.monotonic() < end:
            time.sleep(0.01)
        counts.append(found)
    assert max(counts[2:]) <= counts[1]


def gloo_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)
