"""What modules and operations do to their inputs over a pipeline, they do as in one process, or it is refused.

A module may change its input in place, and what it returns may be its input or a view of it. Another rank than the one
that runs it may hold the value, an older copy of it, or a view.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from smpkit.testing.ranks import RankFailed
from tests.models import WIDTH, Case, doubled, mse_step, vectors
from tests.torch.steps import on_ranks, over_ranks
from tests.train import Way, run, same

SHORT: dict[str, Any] = {"microbatches": 2, "batches": (4, 4)}
EVENLY = Way(pipeline=2, placement=-1, **SHORT)
"""The first half of a model's units on the first rank, the other on the second."""


class Does(nn.Module):
    """Does with its input, its weight and what else it is given as a function says."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.function = function

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.function(x, self.weight, *more)


class DoesLater(Does):
    """Does so from its second call on."""

    calls = 0

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, *more) if self.calls > 1 else shift(x, self.weight)


def shift(x: Tensor, weight: Tensor) -> Tensor:
    """Leave the input alone, and keep nothing of it, so that it may be changed."""
    return x + weight


def change(x: Tensor, weight: Tensor) -> Tensor:
    x.mul_(0.5)  # which needs no input for its gradient, so that others may change it again
    return x + weight


def detach(x: Tensor, weight: Tensor) -> Tensor:
    """Cut the input off, after using it."""
    result = shift(x, weight)
    x.detach_()
    return result


def average(x: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
    """Keep a mean of inputs in a parameter that is given."""
    with torch.no_grad():
        mean.mul_(0.9).add_(x.mean(0))
    return x * weight


def view(x: Tensor, _: Tensor) -> Tensor:
    return x.view_as(x)


class Between(nn.Module):
    """Does something with what the first unit has made, with the others at hand, and goes on with it."""

    def __init__(self, what: str, far: Callable[..., Tensor], kind: type[Does]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.near, self.far = Does(change), kind(far)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.last(ACTS[self.what](self, self.first(x)))


def between(
    what: str, far: Callable[..., Tensor] = change, kind: type[Does] = Does, step: Callable[..., Any] = mse_step
) -> Case:
    return Case(functools.partial(Between, what, far, kind), vectors, step)


def changed_where_it_lies(model: Any, x: Tensor) -> Tensor:
    """Change a value by a unit of its rank and by an operation; the other rank, which has a copy, gets it again."""
    y = model.far(x) + 1
    near = model.near(x)
    x += 1
    return model.far(x) + near + y + x


def changed_after_a_while(model: Any, x: Tensor) -> Tensor:
    """Change a value in a later segment of its rank than the one that made it."""
    y = model.near(model.far(x))
    x += y
    return model.far(x) + x


def written_out(model: Any, x: Tensor) -> Tensor:
    scale = x.detach() * 1
    y = model.far(scale)
    with torch.no_grad():
        torch.add(scale, 1.0, out=scale)
    return x + model.far(scale) + y


class Residual(nn.Module):
    """A block as those of a ResNet: one ReLU, used twice, of which the second changes the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.norm1 = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.linear2, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.linear1(x)))
        out = self.norm2(self.linear2(out))
        out += x
        return self.relu(out)


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
    return nn.Sequential(stem, *[Residual() for _ in range(4)], nn.Linear(WIDTH, WIDTH))


CASES = {
    "what is returned by a unit that changes its input": between("goes on"),
    "changed where it lies": between("changes where it lies", shift),
    "changed after a while": between("changes after a while", shift),
    "written to by `out`": between("writes out", shift),
    "a ResNet": Case(resnet, doubled, mse_step),
}
ROWS = [
    *[(case, EVENLY) for case in CASES],
    ("changed after a while", Way(pipeline=2, placement=-1, config={"pipeline": "zero_bubble"}, **SHORT)),
    ("a ResNet", Way(pipeline=4, placement=3)),
]


@pytest.mark.parametrize(("case", "way"), ROWS, ids=str)
def test_inputs_change_as_in_one_process(case: str, way: Way) -> None:
    same(CASES[case], way)


# --- what cannot be as in one process ---------------------------------------------------------------------------------


def changed_through_a_view(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    x[0].mul_(2.0)
    return y + model.far(x)


def graph_left_behind(model: Any, x: Tensor) -> Tensor:
    row = x[0]
    x += model.near(model.far(x))
    return x + row


def returned_input(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    y += 1
    return x + y


def running_mean(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.linspace(0, 1, WIDTH, dtype=x.dtype).copy_(x.mean(0))
    return x


def viewed_before(model: Any, x: Tensor) -> Tensor:
    """Fill a fresh tensor, a view of which the other ranks would read as it was."""
    fresh = torch.zeros(2, WIDTH, dtype=x.dtype)
    row = fresh[0]
    fresh.add_(model.far(x))
    return x + row


def returned_value(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return a value of which the other rank has changed its copy."""
    first: Tensor = model.module.first(x)
    model.backward(functional.mse_loss(model.module.far(first), y))
    return first


def returned_view(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return a view of what the other rank changes under it."""
    first = model.module.first(x)
    row = first[0]
    model.backward(functional.mse_loss(model.module.far(first), y))
    return row


ACTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "goes on": lambda model, x: model.far(x),
    "changes where it lies": changed_where_it_lies,
    "changes after a while": changed_after_a_while,
    "writes out": written_out,
    "adds what was": lambda model, x: x + model.far(x),
    "adds what was, later": lambda model, x: model.far(x) + 1 + x,
    "hands on a parameter": lambda model, x: model.far(x, model.first.bias),
    "hands on a fresh tensor": lambda model, x: x + model.far(torch.ones(2, WIDTH, dtype=x.dtype)),
    "changes a view": changed_through_a_view,
    "leaves a graph behind": graph_left_behind,
    "changes what was returned": returned_input,
    "copies into a fresh tensor": running_mean,
    "fills a fresh tensor": viewed_before,
}
"""What a `Between` does, by names, which can be sent to ranks."""

VIEWS = r"shares its memory with a value that `far` has changed in place.*take views of a value after"
REFUSED = {
    "used after a unit has changed it elsewhere": (
        between("adds what was"),
        "was used after `far`, which lies on another",
    ),
    "returned after a unit has changed it elsewhere": (
        between("goes on", step=returned_value),
        "was used after `far`, which lies on another",
    ),
    # Ranks ended by a ValueError of `zip` and without a word.
    "a view that is returned": (between("adds what was", step=returned_view), VIEWS),
    "through a view": (
        between("changes a view", shift),
        r"changed in place through a value that shares its memory after pipeline rank 1 had been sent it",
    ),
    "a view of an earlier segment": (
        between("leaves a graph behind", shift),
        "a value that `add_` has changed in place",
    ),
    "what a unit has returned of its input": (
        between("changes what was returned", view),
        "it has returned its input, or a view",
    ),
    "a tensor that all hold": (
        between("hands on a fresh tensor"),
        r"`far` changed in place a tensor of shape \[2, 6\] that every",
    ),
    "a buffer that all hold": (
        between("copies into a fresh tensor", shift),
        r"`copy_` changed in place a tensor of shape \[6\]",
    ),
    "a view of a fresh tensor": (
        between("fills a fresh tensor", shift),
        r"`add_` changed in place a tensor of shape \[2, 6\]",
    ),
    "not the first time": (between("goes on", change, DoesLater), "which it did not do the first time"),
    "a parameter of another rank": (
        between("hands on a parameter", average),
        r"`far` changed in place a parameter of shape \[6\] that pipeline rank 1.*put both on one rank",
    ),
    # Without a word, the first rank got no gradient from a later microbatch: what arrives is a leaf there.
    "detached": (
        between("adds what was, later", detach, DoesLater),
        r"float64\[2, 6\], which pipeline rank 0 made for `far`, was detached in place or frozen there",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_changes_that_ranks_cannot_follow_are_refused(name: str) -> None:
    case, message = REFUSED[name]
    with pytest.raises(RankFailed, match=f"(?s){message}") as caught:
        run(case, EVENLY)
    assert "was used outside it" not in str(caught.value), "no rank may take the change for a tensor that leaked"


# --- three ranks ------------------------------------------------------------------------------------------------------


class Three(nn.Module):
    """Makes a value on the first rank, changes it on the second, and asks the third for what it has made of it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.view, self.last = Does(shift), Does(change), Does(view), Does(shift)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


def viewed_there(model: Any, x: Tensor) -> Tensor:
    view = model.view(x)
    return model.middle(x) + model.last(view)


def sent_before(model: Any, x: Tensor) -> Tensor:
    row = x[0]
    before = model.last(row)
    return model.middle(x) + model.last(row) + before


VIEWED = {"of its copy": viewed_there, "sent there before": sent_before}


@pytest.mark.parametrize("name", VIEWED)
@on_ranks(3, fails="shares its memory with a value that `middle` has changed in place")
def test_views_on_a_third_rank_are_refused(name: str) -> None:
    # They kept the numbers of before the change, without a word.
    module = Three(VIEWED[name])
    model = over_ranks(module, {module.middle: 1, module.view: 2, module.last: 2})
    smp.step(mse_step)(model, torch.ones(2, WIDTH), torch.ones(2, WIDTH))
