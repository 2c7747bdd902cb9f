"""A pipeline trains on the arguments of its rank 0, whatever scripts pass on the other ranks."""

from __future__ import annotations

import collections
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.drop_in import DROP_IN_PATH
from smpkit.errors import SmpkitError, UsageError
from smpkit.torch.pipeline import batch_broadcast
from tests.models import WIDTH, block
from tests.ranks import run_ranks

STEPS = 3


@dataclass
class Sample:
    """A batch as a class of the user's."""

    x: Tensor
    y: Tensor | None


class Recipe:
    """An object that each rank has of its own."""

    scale = 2.0


def plain_step(model: Any, batch: Any, target: Any = None, scale: float = 1.0, recipe: Any = None) -> Tensor:
    if isinstance(batch, Sample):
        batch, target = batch.x, batch.y
    elif isinstance(batch, dict):
        batch, target = batch["x"], batch["y"][0]
    x = batch.to(torch.float64)
    output = model(x)
    loss = functional.mse_loss(output, x if target is None else target) * scale
    if recipe is not None:
        loss = loss * recipe.scale
    model.backward(loss)
    return loss


train_step = smp.step(plain_step)
by_keyword = smp.step(non_split_inputs=["scale"])(plain_step)


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(block(), block(), nn.Linear(WIDTH, WIDTH)).double()


def first(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments of pipeline rank 0."""
    x, y = batch(step)
    return (x, y), {}


def nested(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, y = batch(step)
    return (), {"batch": collections.OrderedDict(x=x, y=[y, {"note": "a"}]), "scale": 0.5}


def same_twice(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, _ = batch(step)
    return (x, x), {}


def with_class(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (Sample(*batch(step)),), {"scale": 1.5, "recipe": Recipe()}


def transposed(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, y = batch(step, WIDTH)
    return (x.t(), y), {}


Given = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]

OTHERS: dict[str, tuple[Given, Given]] = {
    "other shapes": (first, lambda step: ((torch.zeros(4, 2), torch.zeros(1)), {})),
    "empty tensors": (first, lambda step: ((torch.empty(0), torch.empty(0)), {})),
    "another dtype": (first, lambda step: ((torch.zeros(8, WIDTH, dtype=torch.int64), torch.zeros(8, WIDTH)), {})),
    "None": (first, lambda step: ((None, None), {})),
    "other keywords": (nested, lambda step: ((torch.zeros(3),), {})),
    "a dict with other keys": (nested, lambda step: ((), {"batch": {"z": 1}, "scale": 7.0})),
    "a tensor given twice": (same_twice, lambda step: ((torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)), {})),
    "a class": (with_class, lambda step: ((None,), {"recipe": Recipe()})),
    "another memory order": (transposed, first),
    "shapes that change": (
        lambda step: (batch(step, 4 * (1 + step % 2)), {}),
        lambda step: (batch(0, 4 * (1 + step)), {}),
    ),
}


def train(name: str, tensor_degree: int = 1) -> list[float]:
    options = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": tensor_degree, "microbatches": 2, "ddp": True}
    smp.init(options | {"timeout_seconds": 60})
    wrapped: Any = smp.DistributedModel(model())
    given = OTHERS[name][0 if smp.pp_rank() == 0 else 1]
    losses = []
    for step in range(STEPS):
        args, kwargs = given(step)
        losses.append(train_step(wrapped, *args, **kwargs).reduce_mean().item())
    smp.shutdown()
    return losses


def plain(name: str) -> list[float]:
    """Return the losses of one process, which takes the two microbatches one after the other."""
    smp.init({"microbatches": 2})
    wrapped: Any = smp.DistributedModel(model())
    losses = []
    for step in range(STEPS):
        args, kwargs = OTHERS[name][0](step)
        losses.append(train_step(wrapped, *args, **kwargs).reduce_mean().item())
    smp.shutdown()
    return losses


@pytest.mark.parametrize("name", OTHERS)
def test_all_ranks_use_the_arguments_of_rank_0(name: str) -> None:
    (expected,) = run_ranks(plain, 1, name)
    assert run_ranks(train, 2, name) == [expected, expected]


def test_tensor_parallel_ranks_compare_what_the_first_ranks_of_their_pipelines_pass() -> None:
    (expected,) = run_ranks(plain, 1, "other shapes")
    assert run_ranks(train, 4, "other shapes", 2) == [expected] * 4


# --- what a rank lacks ------------------------------------------------------------------------------------------------


def local_class() -> str:
    """Return the error of rank 1, which passes something else than an object of a class that cannot be pickled."""

    @dataclass
    class Local:
        x: Tensor

    @smp.step
    def step(model: Any, sample: Any) -> Tensor:
        loss: Tensor = model(sample.x).sum()
        model.backward(loss)
        return loss

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "timeout_seconds": 60})
    wrapped = smp.DistributedModel(model())
    x, _ = batch(0)
    step(wrapped, Local(x))  # every rank has one: nothing need be sent but the tensor
    try:
        step(wrapped, Local(x[:4]) if smp.pp_rank() == 0 else None)
    except SmpkitError as error:
        return str(error)
    return ""


def own_object() -> str:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "timeout_seconds": 60})
    wrapped = smp.DistributedModel(model())
    try:
        train_step(wrapped, *batch(0), recipe=Recipe() if smp.pp_rank() == 0 else None)
    except SmpkitError as error:
        return str(error)
    return ""


def caught(function: Callable[[], str]) -> str:
    """Return the error of rank 1; rank 0 learns of it from the failure that rank 1 reports when it ends."""
    from smpkit.torch.distributed import deadline

    said = function()
    if smp.pp_rank() == 1:
        deadline.report_failure(UsageError(said))
    return said


def test_an_object_that_a_rank_lacks_is_named() -> None:
    _, second = run_ranks(caught, 2, own_object)
    assert "pipeline rank 0 passed an object of type `tests.transparency.test_pipeline_inputs.Recipe`" in second
    assert "as argument `recipe` of the step `plain_step`" in second
    assert "pipeline rank 1 passed one of type `builtins.NoneType`" in second


def test_arguments_that_cannot_be_sent_are_named_where_a_rank_needs_them() -> None:
    _, second = run_ranks(caught, 2, local_class)
    assert "pipeline rank 0 passed arguments to the step `step`" in second
    assert "cannot be sent" in second
    assert "Local" in second


# --- what is said -----------------------------------------------------------------------------------------------------


def sharded_by_rank(v1: bool, same: bool) -> list[str]:
    """Return the warnings of a script that gives each rank of a pipeline data of its own, as if all were replicas."""
    if v1:
        sys.path.insert(0, str(DROP_IN_PATH))
        importlib.import_module("smdistributed.modelparallel.torch")
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "timeout_seconds": 60})
    wrapped = smp.DistributedModel(model())
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        for step in range(3):
            train_step(wrapped, *batch(step if same else 10 * step + smp.rank()))
    smp.shutdown()
    return [str(each.message) for each in caught_warnings if "dp_rank" in str(each.message)]


def test_data_sharded_by_rank_is_warned_of_once() -> None:
    first, second = run_ranks(sharded_by_rank, 2, False, False)
    assert first == []
    (warning,) = second
    assert "pipeline rank 1 passed other values to the step `plain_step`" in warning
    assert "shard data by smp.dp_rank() of smp.dp_size()" in warning
    assert run_ranks(sharded_by_rank, 2, False, True) == [[], []]


def test_scripts_of_smp_v1_are_not_warned() -> None:
    assert run_ranks(sharded_by_rank, 2, True, False) == [[], []]


# --- how much is remembered -------------------------------------------------------------------------------------------


def many_kinds() -> list[int]:
    """Train with more kinds of arguments than are remembered, some of which return; return how many are."""
    batch_broadcast.MAX_KINDS = 4  # type: ignore[misc]
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 1, "ddp": True, "timeout_seconds": 60})
    wrapped: Any = smp.DistributedModel(model())
    for size in [1, 2, 3, 1, 4, 5, 6, 2, 1, 7, 3, 3]:
        x, y = batch(size, size if smp.pp_rank() == 0 else 1)
        loss = train_step(wrapped, x, y).reduce_mean().item()
        x, y = batch(size, size)
        assert loss == pytest.approx(functional.mse_loss(wrapped_forward(wrapped, x), y).item())
    remembered = wrapped.pipeline._input_broadcast
    smp.shutdown()
    return [len(remembered._sent), len(remembered._received)]


@smp.step
def forward_step(model: Any, x: Tensor) -> Tensor:
    return model(x)


def wrapped_forward(wrapped: Any, x: Tensor) -> Tensor:
    return forward_step(wrapped, x).concat()


def test_all_ranks_forget_the_same_kinds() -> None:
    assert run_ranks(many_kinds, 3) == [[4, 0], [0, 4], [0, 4]]
