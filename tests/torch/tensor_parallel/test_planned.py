"""What a plan says that ranks hold under tensor parallelism is what real ranks hold, to the byte."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import smpkit.torch as smp
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.memory import memory_of_rank
from smpkit.plan.mesh import Mesh
from smpkit.plan.partition.search import partition
from smpkit.torch.describe import describe
from tests.models_of_others import DIVISIBLE
from tests.torch.steps import on_ranks
from tests.train import batch

RANKS = 4
CASES: list[tuple[str, dict[str, Any]]] = [
    ("GPT2", {"tensor_parallel_degree": 2}),
    ("Llama", {"tensor_parallel_degree": 4, "prescaled_batch": True}),
    ("Mixtral", {"tensor_parallel_degree": 2, "shard_optimizer_state": True, "optimize": "speed"}),
    ("GPT2", {"tensor_parallel_degree": 2, "shard_optimizer_state": True, "prescaled_batch": True}),
    ("GPT2", {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2}),
    ("Llama", {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2, "prescaled_batch": True}),
    ("GPT2", {"tensor_parallel_degree": 2, "bf16": True, "shard_optimizer_state": True}),
    ("GPT2", {"pipeline_parallel_degree": 2, "microbatches": 2, "fp16": True}),
    ("Llama", {"sharded_data_parallel_degree": 2, "bf16": True}),
]


def build(name: str) -> nn.Module:
    module = DIVISIBLE[name].build()
    smp.set_tensor_parallelism(module)
    return module


def planned(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return build(name), {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "labels": torch.zeros(2, 6).long()}


@smp.step
def train_step(model: Any, tokens: Tensor) -> None:
    model.backward(model(input_ids=tokens, labels=tokens)["loss"])


def bytes_of(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def held(name: str, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the bytes of this rank's parameters and buffers, of masters, and of its optimizer's states."""
    smp.init({"ddp": True, **config})
    model = smp.DistributedModel(build(name))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    train_step(model, batch(DIVISIBLE[name], 0, 4)[0])
    optimizer.step()
    tensors = {id(each): each for each in (*model.local_parameters(), *model.local_buffers())}
    moments = [each[key] for each in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq") if key in each]
    masters = [] if optimizer.masters is None else optimizer.masters.masters().values()
    found = sum(map(bytes_of, tensors.values())), sum(map(bytes_of, masters)), sum(map(bytes_of, moments))
    smp.shutdown()
    return found


def foreseen(name: str, config: Mapping[str, Any], rank: int) -> tuple[int, int, int]:
    """Return what a plan says of a rank."""
    cfg, _ = ModelParallelConfig.from_sources({"ddp": True, **config}, None)
    mesh = Mesh.of(cfg, RANKS)
    model = describe(lambda: planned(name), cfg=cfg, world_size=RANKS)
    assert not smp.is_initialized()
    assert model.traced or name == "Mixtral"  # how many tokens an expert gets is a value
    assignment = partition(model.costs, cfg.pipeline_parallel_degree, cfg.memory_weight)
    memory = memory_of_rank(model, assignment, cfg, mesh, [rank], 1.0, "adamw")
    return memory.parameters_bytes, memory.masters_bytes, memory.optimizer_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), CASES)
@on_ranks(RANKS, timeout=180)
def test_ranks_hold_what_was_planned(name: str, config: dict[str, Any]) -> None:
    plan = foreseen(name, config, int(os.environ["RANK"]))
    found = held(name, config)
    are_padded = "sharded_data_parallel_degree" in config  # parts, to the same size
    assert (found[1] > 0) is (("bf16" in config or "fp16" in config) and not are_padded)
    for planned_bytes, num_bytes in zip(plan, found, strict=True):
        assert (0.95 if are_padded else 1) * planned_bytes <= num_bytes <= planned_bytes


def test_what_is_not_divided_is_said_and_a_plan_leaves_nothing_behind() -> None:
    cfg, _ = ModelParallelConfig.from_sources({"tensor_parallel_degree": 2, "ddp": True}, None)

    def odd() -> nn.Module:
        with smp.tensor_parallelism():
            return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))

    model = describe(odd, cfg=cfg, world_size=2)
    assert not smp.is_initialized()
    assert model.notes == (
        "Tensor parallelism over 2 ranks: 1 Linear -> DistributedLinear.",
        "  not distributed: Linear `0`: in_features 3 is not divisible by tensor_parallel_degree 2",
    )
    assert model.tensors["1.weight"].pieces == (32, 32)
    assert model.tensors["0.weight"].pieces == ()
    assert (
        "create the model under smp.tensor_parallelism()"
        in describe(lambda: nn.Linear(4, 4), cfg=cfg, world_size=2).notes[0]
    )
