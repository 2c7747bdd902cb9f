"""A script that never runs backward is told so; one that has no gradients on purpose goes on."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit import OffloadModel
from smpkit.errors import UsageError
from smpkit.testing import run_ranks

NO_BACKWARD = "no backward has run: no weight would change"


def make(config: dict[str, Any] | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    smp.init(config or {})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def step_of(model: Any, *, trains: bool = True) -> None:
    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        if trains:
            model.backward(loss)
        return loss

    step(torch.ones(4, 4))


@pytest.mark.usefixtures("world")
def test_without_any_backward_a_step_is_an_error() -> None:
    model, optimizer = make()
    step_of(model, trains=False)
    with pytest.raises(UsageError, match=NO_BACKWARD) as caught:
        optimizer.step()
    assert "model.backward(loss)" in str(caught.value.hint)


@pytest.mark.usefixtures("world")
def test_a_forward_outside_a_step_counts_too() -> None:
    model, optimizer = make()
    model(torch.ones(4, 4))
    with pytest.raises(UsageError, match=NO_BACKWARD):
        optimizer.step()


def over_a_pipeline(config: dict[str, Any]) -> str:
    model, optimizer = make(config=config)
    step_of(model, trains=False)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("extra", [{}, {"bf16": True}])
def test_over_a_pipeline_every_rank_says_so(extra: dict[str, Any]) -> None:
    for said in run_ranks(over_a_pipeline, 2, {"pipeline_parallel_degree": 2, "microbatches": 2, **extra}):
        assert NO_BACKWARD in said


def half_of_the_model_without_gradients() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    smp.set_partition(module[0], 0)
    smp.set_partition(module[1], 1)
    for frozen in module[0].parameters():
        frozen.requires_grad_(False)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(model)
        optimizer.step()


def test_a_rank_without_gradients_goes_on() -> None:
    run_ranks(half_of_the_model_without_gradients, 2)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("case", ["accumulation", "by hand", "no passes", "evaluation", "no_grad", "frozen", "others"])
def test_what_is_meant_goes_on(case: str) -> None:
    model, optimizer = make()
    if case == "accumulation":
        step_of(model)
        step_of(model, trains=False)
    elif case == "by hand":
        step_of(model, trains=False)
        next(model.parameters()).grad = torch.ones(4, 4)
    elif case == "evaluation":
        model.eval()
        step_of(model, trains=False)
    elif case == "frozen":
        model.requires_grad_(False)
        step_of(model, trains=False)
    elif case != "no passes":
        with torch.no_grad() if case == "no_grad" else contextlib.nullcontext():
            step_of(model, trains=False)
    if case == "others":
        optimizer = smp.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.step()


@pytest.mark.usefixtures("world")
def test_an_offload_model_hands_its_gradients_over_by_another_way() -> None:
    smp.init()
    inner = OffloadModel(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        num_slices=2,
    )
    model = smp.DistributedModel(inner)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
