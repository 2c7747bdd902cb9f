"""A script that never runs backward is told so; one that leaves a backward out on purpose goes on."""

from __future__ import annotations

import contextlib
import copy
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


def make(wrapped: bool = True, config: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    smp.init(config or {})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, smp.DistributedOptimizer(optimizer) if wrapped else optimizer


def step_of(model: Any, *, trains: bool = True) -> None:
    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sum()
        if trains:
            model.backward(loss)
        return loss

    step(torch.ones(4, 4))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("wrapped", [True, False])
def test_without_any_backward_a_step_is_an_error(wrapped: bool) -> None:
    model, optimizer = make(wrapped)
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


def out_of_batches() -> None:
    model, optimizer = make(config={"ddp": True})
    with model.join():
        for _ in range(1 + smp.rank()):
            optimizer.zero_grad()
            step_of(model)
            optimizer.step()


def test_ranks_that_run_out_of_batches_go_on() -> None:
    run_ranks(out_of_batches, 2)


@pytest.mark.usefixtures("world")
def test_a_backward_that_is_left_out_later_is_only_warned_of_once() -> None:
    model, optimizer = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for trains in (True, False, True, False):
            optimizer.zero_grad()
            step_of(model, trains=trains)
            optimizer.step()
    assert [str(each.message) for each in caught] == [
        "optimizer.step() changes no weight: no backward has run since the step before it"
    ]
    assert caught[0].filename == __file__


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
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.step()


@pytest.mark.usefixtures("world")
def test_two_optimizers_may_follow_one_backward() -> None:
    model, first = make()
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(model)
    first.step()
    second.step()


@pytest.mark.usefixtures("world")
def test_an_offload_model_is_trained_as_any_other() -> None:
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


@pytest.mark.usefixtures("world")
def test_the_check_ends_with_the_model() -> None:
    model, optimizer = make()
    twin = copy.deepcopy(model)
    step_of(model, trains=False)
    smp.shutdown()
    optimizer.optimizer.step()
    assert next(twin.parameters()).grad is None
