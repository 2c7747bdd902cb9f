"""A script that never runs backward is told so; one that has no gradients on purpose goes on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit import OffloadModel
from smpkit.errors import UsageError
from tests.models import Does
from tests.torch.steps import evaluate, on_ranks, train_step, wrap

pytestmark = pytest.mark.usefixtures("world")
NO_BACKWARD = "no backward has run: no weight would change"


def make(config: dict[str, Any] | None = None) -> tuple[Any, Any]:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **(config or {}))
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


X = torch.ones(4, 4)


@pytest.mark.parametrize("in_step", [True, False])
def test_without_any_backward_an_update_is_an_error(in_step: bool) -> None:
    model, optimizer = make()
    if in_step:
        evaluate(model, X)
    else:
        model(X)
    with pytest.raises(UsageError, match=rf"{NO_BACKWARD}(?s:.*)hint: .*model\.backward\(loss\)"):
        optimizer.step()


@pytest.mark.parametrize("config", [{}, {"bf16": True}], ids=str)
@on_ranks(2)
def test_over_a_pipeline_every_rank_says_so(config: dict[str, Any]) -> None:
    model, optimizer = make({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    evaluate(model, X)
    with pytest.raises(UsageError, match=NO_BACKWARD):
        optimizer.step()
    # One part may have no gradients at all.
    first, second = model.module
    first.requires_grad_(False)
    assert second is not first
    train_step(model, X)
    optimizer.step()


def weighing_loss() -> Any:
    """Return a loss with a weight of its own, as for several tasks."""
    return Does(lambda own, loss: loss / own.weight.square().sum(), weight=nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    "config",
    [{"pipeline_parallel_degree": 2}, {"ddp": True}, {"ddp": True, "sharded_data_parallel_degree": 2}],
    ids=str,
)
@on_ranks(2)
def test_what_is_not_in_the_model_cannot_be_trained(config: dict[str, Any]) -> None:
    # Over a pipeline the last rank trained it, and the first kept the old values. Replicas grew apart.
    model, _ = make({"microbatches": 2, **config})
    weighing, frozen = weighing_loss(), nn.Parameter(torch.ones(3), requires_grad=False)
    parameters = [*model.parameters(), frozen, *weighing.parameters()]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))

    @smp.step
    def weighing_step(model: Any, x: torch.Tensor) -> None:
        model.backward(weighing(model(x).square().mean()))

    weighing_step(model, X)
    with pytest.raises(UsageError, match=r"trains a parameter of shape \[2\] that is not in the model"):
        optimizer.step()
    weighing.zero_grad()
    weighing.requires_grad_(False)
    optimizer.step()


@on_ranks(2)
def test_another_optimizer_trains_beside_a_pipeline_what_all_its_ranks_train_alike() -> None:
    # A center loss, or a temperature, was trained on the rank that had the loss, and stayed as it was on the others.
    model, _ = make({"microbatches": 2, "pipeline_parallel_degree": 2})
    weighing = weighing_loss()
    optimizer = torch.optim.SGD(weighing.parameters(), lr=0.1)

    @smp.step
    def weighing_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        model.backward(weighing(out.square().mean()))
        return out

    returned = weighing_step(model, X).concat()
    has_loss = weighing.weight.grad is not None
    assert has_loss == (smp.pp_rank() == 1)
    with pytest.raises(UsageError, match="is not in the model") if has_loss else contextlib.nullcontext():
        optimizer.step()
    optimizer.zero_grad()
    weighing(returned.square().mean()).backward()
    optimizer.step()
    smp.barrier()


@pytest.mark.parametrize("case", ["accumulation", "by hand", "no passes", "evaluation", "no_grad", "frozen", "others"])
def test_an_update_that_is_empty_on_purpose_goes_on(case: str) -> None:
    model, optimizer = make()
    if case == "accumulation":
        train_step(model, X)
    model.train(case != "evaluation")
    model.requires_grad_(case != "frozen")
    with torch.set_grad_enabled(case != "no_grad"):
        if case != "no passes":
            evaluate(model, X)
    if case == "by hand":
        next(model.parameters()).grad = torch.ones(4, 4)
    if case == "others":
        optimizer = smp.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    optimizer.step()


def test_an_offload_model_is_trained_as_any_other() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = wrap(OffloadModel(layers, "cpu", num_slices=2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
