"""What a pipeline made is gone when it is over: stages, and with them models and threads."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, ClassVar, Final

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.torch.pipeline.stage_context import StageContext
from tests.ranks import run_ranks
from tests.torch.small_steps import KINDS, batch, begin
from tests.transparency.checkpointed_models import Variant, train


def train_twice() -> tuple[int, list[str]]:
    for horizon in (None, 2):
        train(Variant("each", 4, horizon=horizon), 2)
    assert not smp.is_initialized()
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(60)
    return sum(isinstance(each, StageContext) for each in gc.get_objects()), [
        each.name for each in threading.enumerate()
    ]


def test_stages_and_their_threads_end_with_the_training() -> None:
    for stages, threads in run_ranks(train_twice, 2):
        assert stages == 0
        assert threads == ["MainThread"]


MODES: Final[list[dict[str, Any]]] = [
    {"pipeline_parallel_degree": 2},
    {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble", "offload_activations": True},
    {"tensor_parallel_degree": 2, "shard_optimizer_state": True},
    {"sharded_data_parallel_degree": 2},
]


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def tensors_while_training(mode: dict[str, Any]) -> list[int]:
    """Return how many tensors there are after some steps, and after as many again."""
    smp.init({"ddp": True, "microbatches": 2, **mode})
    torch.manual_seed(0)
    with smp.tensor_parallelism(smp.tp_size() > 1):
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = smp.DistributedModel(net)
    if mode.get("offload_activations"):
        smp.set_activation_checkpointing(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    counts = []
    for step in range(16):
        optimizer.zero_grad()
        train_step(model, torch.randn(4, 8)).reduce_mean()
        optimizer.step()
        if step in (7, 15):
            gc.collect()
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    smp.shutdown()
    return counts


def tensors_in_all_modes() -> list[list[int]]:
    return [tensors_while_training(mode) for mode in MODES]


def test_steps_leave_no_tensors_behind() -> None:
    for modes in run_ranks(tensors_in_all_modes, 2):
        for mode, (early, late) in zip(MODES, modes, strict=True):
            assert late <= early + 4, mode  # one that each of the eight steps left would be eight


def tensors_in_cycles(names: list[str]) -> dict[str, int]:
    """Return how many tensors of some steps of each kind wait for Python to look for cycles."""
    found = {}
    for name in names:
        with begin(KINDS[name]) as trained:
            for number in range(6):
                if number == 3:  # those before it record, measure and plan
                    gc.collect()
                    gc.disable()
                trained.step(batch(number))
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            found[name] = sum(isinstance(each, torch.Tensor) for each in gc.garbage)
            gc.garbage.clear()
            gc.enable()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_memory_never_waits_for_pythons_search_for_cycles(size: int) -> None:
    names = [name for name, kind in KINDS.items() if kind.ranks == size]
    assert run_ranks(tensors_in_cycles, size, names) == [dict.fromkeys(names, 0)] * size


class Watched(torch.autograd.Function):
    """Doubles; its node lives as long as the graph it is in."""

    nodes: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Watched.nodes.append(weakref.ref(ctx))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


class Watching(nn.Linear):
    """Counts how many graphs there are when it runs."""

    most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Watched.apply(super().forward(x))
        self.most = max(self.most, sum(node() is not None for node in Watched.nodes))
        return y


def graphs_at_a_time() -> int:
    """Return how many microbatches' graphs the second of two stages held at a time."""
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 6,
            "active_microbatches": 2,
            "pipeline": "zero_bubble",
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Watching(8, 8))
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)
    for _ in range(3):
        model.zero_grad()
        Watched.nodes.clear()
        train_step(model, torch.randn(12, 8)).reduce_mean()
    assert smp.pp_rank() == 0 or Watched.nodes
    most = net[1].most
    assert isinstance(most, int)
    return most


def test_a_returned_loss_keeps_no_graph_whose_backward_ran_in_halves() -> None:
    first, last = run_ranks(graphs_at_a_time, 2)
    assert first == 0
    assert 0 < last <= 2
