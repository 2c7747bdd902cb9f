"""What a plan says is what ranks do: the units of each, and the order of its actions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.decide import decide
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.speed import Speed
from smpkit.torch.describe import describe
from tests.ranks import run_ranks
from tests.torch.steps import train_step

WIDTH = 8
SPEED = Speed(1e12, LinkSpeed(1e10, 1e10))


def made() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose first layers are wider, so that equal numbers of layers are no equal parts."""
    widths = [WIDTH, 64, 64, WIDTH, WIDTH, WIDTH, WIDTH]
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    return nn.Sequential(*layers), torch.zeros(2, WIDTH)


def run(options: dict[str, Any]) -> tuple[dict[str, int], str]:
    """Return the units that the ranks chose, and what this one did, in order."""
    smp.init(options)
    model = smp.DistributedModel(made()[0])
    train_step(model, torch.ones(2 * options["microbatches"], WIDTH))
    pipeline = model.pipeline
    assert pipeline is not None
    assert pipeline.assignment is not None
    assert pipeline._executor is not None
    schedule = pipeline._executor.last_schedule
    assert schedule is not None
    assignment = pipeline.assignment.partition_of
    actions = " ".join(map(str, schedule.actions[smp.pp_rank()]))
    smp.shutdown()
    return dict(assignment), actions


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_degree": 2, "microbatches": 4},
        {"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": "simple", "skip_tracing": True},
        {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "zero_bubble", "memory_weight": 0.1},
        {"pipeline_parallel_degree": 2, "microbatches": 4, "virtual_pipeline_degree": 2},
    ],
)
def test_ranks_do_what_the_plan_says(options: dict[str, Any]) -> None:
    config, _ = ModelParallelConfig.from_sources(options, None)
    traced = not config.skip_tracing
    num_places = 2 * config.virtual_pipeline_degree
    facts = describe(made if traced else lambda: made()[0], num_places, cfg=config, world_size=2)
    plan = decide(config, 2, facts, SPEED)
    assert plan.assignment is not None
    expected = [" ".join(map(str, actions)) for actions in plan.timeline.schedule.actions]
    found = run_ranks(run, 2, options)
    assert [units for units, _ in found] == [plan.assignment.partition_of] * 2
    assert [actions for _, actions in found] == expected
