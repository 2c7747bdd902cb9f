"""What training makes goes with it: models, stages, graphs and threads; and no cycle holds memory."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.torch.pipeline.stage_context import StageContext
from tests.models import DROPOUT, WIDTH, Case, mse_step, vectors
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import KINDS, Way, batch, checkpoint_layers, train, training

ALL = {**KINDS, "data, sharded": (DROPOUT, Way(replicas=2, config={"sharded_data_parallel_degree": 2, "bf16": True}))}


def still_there(names: list[str]) -> list[str]:
    """Train a model of each kind and drop it; return what outlives that."""
    watched: dict[str, weakref.ref[Any]] = {}
    for name in names:
        case, way = ALL[name]
        with training(case, way) as trained:
            for number in range(2):
                trained.step(*batch(case, number, 8))
            for part in (trained.model, trained.model.get_module(), trained.optimizer):
                watched[f"{name}: {type(part).__name__}"] = weakref.ref(part)
            del trained, part
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_of_a_model_outlives_it(ranks: int) -> None:
    names = [name for name, (_, way) in ALL.items() if way.ranks == ranks]
    assert len(names) >= 3
    assert run_ranks(still_there, ranks, names) == [[]] * ranks


@on_ranks(2)
def test_stages_and_their_threads_end_with_the_training() -> None:
    for config in ({}, {"offload_activations": True, "activation_loading_horizon": 2}):
        train(DROPOUT, Way(pipeline=2, config=config, prepare=checkpoint_layers))
    assert not smp.is_initialized()
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(60)
    assert not any(isinstance(each, StageContext) for each in gc.get_objects())
    assert [each.name for each in threading.enumerate()] == ["MainThread"]


def tensors_in_cycles(name: str) -> int:
    """Return how many tensors of some steps wait for Python to look for cycles."""
    case, way = KINDS[name]
    with training(case, way) as trained:
        for number in range(6):
            if number == 3:  # those before it record, measure and plan
                gc.collect()
                gc.disable()
            trained.step(*batch(case, number, 8))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.garbage)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("data", "pipeline")])  # others do as they
def test_memory_never_waits_for_pythons_search_for_cycles(name: str) -> None:
    ranks = KINDS[name][1].ranks
    assert run_ranks(tensors_in_cycles, ranks, name) == [0] * ranks


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


def watched_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Watching(WIDTH, WIDTH))


@on_ranks(2)
def test_a_returned_loss_keeps_no_graph_whose_backward_ran_in_halves() -> None:
    """Count the microbatches whose graphs the second of two stages holds at a time."""
    case = Case(watched_model, vectors, mse_step)
    config = {"active_microbatches": 2, "pipeline": "zero_bubble"}
    with training(case, Way(pipeline=2, microbatches=6, placement=-1, config=config)) as trained:
        for number in range(3):
            Watched.nodes.clear()
            trained.step(*batch(case, number, 12))
        watching: Any = trained.model.get_module().get_submodule("1")
        assert 0 < watching.most <= 2 if smp.pp_rank() else watching.most == 0
