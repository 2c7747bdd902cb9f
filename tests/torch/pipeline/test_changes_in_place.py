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

from tests.models import WIDTH, Case, doubled, mse_step, vectors
from tests.ranks import RankFailed
from tests.train import Way, run, same

SHORT: dict[str, Any] = {"microbatches": 2, "batches": (4, 4)}
EVENLY = Way(pipeline=2, placement=-1, **SHORT)
"""The first half of a model's units on the first rank, the other on the second."""


class Changes(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)  # which needs no input for its gradient, so that others may change it again
        return x + self.weight


class Shifts(nn.Module):
    """Leaves its input alone, and keeps nothing of it, so that it may be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Between(nn.Module):
    """Lets `function` do something with what the first unit has made, with the others at hand, and goes on with it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.near = Changes()
        self.far = middle()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.function(self, self.first(x)))
        return result


def between(function: Callable[[Any, Tensor], Tensor], middle: Callable[[], nn.Module] = Changes) -> Case:
    return Case(functools.partial(Between, function, middle), vectors, mse_step)


def residual(model: Any, x: Tensor) -> Tensor:
    result: Tensor = x + model.far(x)
    return result


def changed_everywhere(model: Any, x: Tensor) -> Tensor:
    y = model.far(x)
    y = y + 1
    near = model.near(x)
    x += 1
    result: Tensor = model.far(x) + near + y + x
    return result


def written_out(model: Any, x: Tensor) -> Tensor:
    scale = x.detach() * 1
    y = model.far(scale)
    with torch.no_grad():
        torch.add(scale, 1.0, out=scale)
    result: Tensor = x + model.far(scale) + y
    return result


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
        result: Tensor = self.relu(out)
        return result


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
    return nn.Sequential(stem, *[Residual() for _ in range(4)], nn.Linear(WIDTH, WIDTH))


CASES = {
    "a residual around a unit that changes its input": between(residual),
    "changed there, here and between": between(changed_everywhere),
    "written to by `out`": between(written_out, Shifts),
    "a ResNet": Case(resnet, doubled, mse_step),
}
ROWS = [
    *[(case, EVENLY) for case in CASES],
    ("changed there, here and between", Way(pipeline=2, placement=5, config={"pipeline": "zero_bubble"}, **SHORT)),
    ("a ResNet", Way(pipeline=4, placement=3)),
]


@pytest.mark.parametrize(("case", "way"), ROWS, ids=str)
def test_inputs_change_as_in_one_process(case: str, way: Way) -> None:
    same(CASES[case], way)


# --- what cannot be as in one process ---------------------------------------------------------------------------------


class Detaches(Shifts):
    """Cuts its input off, after using it, each second time."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.count += 1
        if self.count % 2 == 0:
            x.detach_()
        return result


class Averages(Shifts):
    """Keeps a mean of its inputs in a parameter that it is given."""

    def forward(self, x: Tensor, mean: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            mean.mul_(0.9).add_(x.mean(0))
        return x * self.weight


def added_after(model: Any, x: Tensor) -> Tensor:
    y = model.far(x) + 1
    result: Tensor = y + x
    return result


def averaged(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model.far(x, model.first.bias)
    return result


def seen_before(model: Any, x: Tensor) -> Tensor:
    row = x[0]
    result: Tensor = model.far(x) + row
    return result


REFUSED = {
    "a view that lies elsewhere": (between(seen_before), r"shares its memory.*take views of it after that"),
    "a parameter of another rank": (
        between(averaged, Averages),
        r"`far` changed in place a parameter of shape \[6\] that pipeline rank 1.*put both on one rank",
    ),
    # Without a word, the first rank got no gradient from a later microbatch: what arrives is a leaf there.
    "detached": (
        between(added_after, Detaches),
        r"float64\[2, 6\], which pipeline rank 0 made for `far`, was detached in place or frozen there",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_changes_that_ranks_cannot_follow_are_refused(name: str) -> None:
    case, message = REFUSED[name]
    with pytest.raises(RankFailed, match=f"(?s){message}") as caught:
        run(case, EVENLY)
    assert "was used outside it" not in str(caught.value), "no rank may take the change for a tensor that leaked"
