"""A model goes when the script drops it: notebooks and tests wrap one after the other in a process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from tests.ranks import run_ranks
from tests.torch.steps import train_step

OVER_TWO_RANKS: list[dict[str, Any]] = [
    {"ddp": True},
    {"ddp": True, "shard_optimizer_state": True},
    {"ddp": True, "sharded_data_parallel_degree": 2, "bf16": True},
    {"tensor_parallel_degree": 2, "ddp": True},
    {"pipeline_parallel_degree": 2, "microbatches": 2},
    {"pipeline_parallel_degree": 2, "microbatches": 2, "offload_activations": True, "fp16": True},
]


def still_there(config: dict[str, Any]) -> list[str]:
    """Train a model and drop it; return what outlives that."""
    smp.init(config)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    if "offload_activations" in config:
        smp.set_activation_checkpointing(module[0])
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        train_step(model, torch.ones(4, 8))
        optimizer.step()
    watched: dict[str, weakref.ref[Any]] = {
        "model": weakref.ref(model),
        "module": weakref.ref(module),
        "optimizer": weakref.ref(optimizer),
    }
    smp.shutdown()
    del model, module, optimizer
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


def still_there_of_all(configs: list[dict[str, Any]]) -> list[list[str]]:
    return [still_there(config) for config in configs]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("config", [{}, {"microbatches": 2, "bf16": True}], ids=str)
def test_on_one_rank(config: dict[str, Any]) -> None:
    assert not still_there(config)


def test_on_two_ranks() -> None:
    assert run_ranks(still_there_of_all, 2, OVER_TWO_RANKS) == [[[]] * len(OVER_TWO_RANKS)] * 2
