"""How a value lies in memory, it lies on every rank: strides are answered, and results laid out, as in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from tests.models import WIDTH, Case, mse_step, vectors
from tests.torch.steps import evaluate, on_ranks, over_ranks
from tests.train import Way, same

WAY = Way(pipeline=2, microbatches=2, batches=(4, 4), placement=5, config={"pipeline": "zero_bubble"})


class Asks(nn.Module):
    """Computes with how its input lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous() or not _can_be_viewed(x)
        factor = torch.tensor(x.stride(), dtype=x.dtype).prod() + x.is_contiguous()
        return x * factor * self.weight[: x.shape[-1]]


def _can_be_viewed(x: Tensor) -> bool:
    try:
        x.view(-1)
    except RuntimeError:
        return False
    return True


class Around(nn.Module):
    """Lets `function` do something with what the first unit has made, and goes on with it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.near, self.far, self.last = nn.Linear(WIDTH, WIDTH), Asks(), Asks(), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


def transposed(model: Any, x: Tensor) -> Tensor:
    turned = x.t()
    return x + (model.near(turned) + model.far(turned)).t()


def channels_last(model: Any, x: Tensor) -> Tensor:
    image = x.view(-1, WIDTH, 1, 1).expand(-1, -1, 2, 3).contiguous(memory_format=torch.channels_last)
    image = model.far(model.near(image))
    return x + image.mean((2, 3)) * image.is_contiguous(memory_format=torch.channels_last)


def on_both(model: Any, x: Tensor) -> Tensor:
    """Add transposed values here, then one of here and one of there: what comes out lies alike."""
    turned = x.t()
    there = model.far(x).t()
    return (turned + turned * 2).t() + (turned + there).t()


def changed_there(model: Any, x: Tensor) -> Tensor:
    turned = (x * 2).t()
    y = model.far(turned)
    turned += 1
    functional.relu(turned, inplace=True)
    return (y + model.far(turned) + turned).t()


CASES = {
    "transposed": transposed,
    "channels last": channels_last,
    "the same operation on both ranks": on_both,
    "changed in place": changed_there,
}


@pytest.mark.parametrize("case", CASES)
def test_values_lie_as_in_one_process(case: str) -> None:
    same(Case(functools.partial(Around, CASES[case]), vectors, mse_step), WAY)


class Turned(nn.Module):
    """Gives its input to a unit of either rank, and returns what lies in memory the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.near, self.far = nn.Linear(WIDTH, WIDTH), Asks(), Asks()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.far(self.first(x) + self.near(x)) + self.far(x)
        return y.t().contiguous().t()


@on_ranks(2)
def test_inputs_and_outputs_lie_alike_on_all_ranks() -> None:
    """Ranks that know other kinds of arguments than the others wait for them for ever."""
    torch.manual_seed(3)
    model = Turned()
    plain = copy.deepcopy(model)
    wrapped, text = over_ranks(model, {model.far: 1}, microbatches=2), torch.randn(8, 2 * WIDTH)
    turned = torch.randn(WIDTH, 4).t()
    for first, own in (
        (text[:4, :WIDTH].clone(), None),
        (text[:4, :WIDTH], None),  # with gaps, as `tokens[:, :-1]` has
        (turned, None),
        (turned, torch.zeros(4, WIDTH)),  # of the other rank, whose contents nobody looks at, nor how they lie
        (text[:2, :WIDTH], None),  # microbatches of one row
    ):
        with torch.no_grad():
            returned = evaluate(wrapped, first if own is None or smp.pp_rank() == 0 else own).outputs
            wanted = [plain(part) for part in first.clone().chunk(2)]
        assert smp.pp_rank() > 0 or all(map(torch.equal, returned, wanted))
        strides = [output.stride() for output in returned]
        assert smp.allgather(strides, smp.CommGroup.PP_GROUP) == [strides] * 2
