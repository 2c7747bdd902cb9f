"""How a value lies in memory, it lies on every rank: strides are answered, and results laid out, as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, run_all
from tests.transparency.pipeline_models import WIDTH, Case, mse_step, vectors

SETUPS = [Setup(2, "interleaved", -1, (4, 4)), Setup(2, "zero_bubble", 5, (4, 4))]


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
        result: Tensor = self.last(self.function(self, self.first(x)))
        return result


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
    result: Tensor = (turned + turned * 2).t() + (turned + there).t()
    return result


def changed_there(model: Any, x: Tensor) -> Tensor:
    turned = (x * 2).t()
    y = model.far(turned)
    turned += 1
    functional.relu(turned, inplace=True)
    result: Tensor = (y + model.far(turned) + turned).t()
    return result


def conjugated(model: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.fft(x.to(torch.complex128)).conj()
    result: Tensor = model.far(torch.ones_like(spectrum) * spectrum).real + model.far(spectrum).imag + x
    return result


CASES = {
    "transposed": transposed,
    "channels last": channels_last,
    "the same operation on both ranks": on_both,
    "changed in place": changed_there,
    "conjugated": conjugated,
}


def train() -> int:
    cases = {name: Case(functools.partial(Around, function), vectors, mse_step) for name, function in CASES.items()}
    return len(run_all(cases, SETUPS, 2))


def test_values_lie_as_in_one_process() -> None:
    assert run_ranks(train, 2, timeout=120) == [len(CASES)] * 2
