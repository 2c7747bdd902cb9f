"""What recomputation restores on modules, and what it refuses because it cannot be had back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError

WIDTH = 4


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Habits(nn.Module):
    """Reads and changes what lies on the module: a buffer that is None at first, a counter, an average, parts."""

    kept: Tensor | None
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.norm = linear(), linear(), nn.BatchNorm1d(WIDTH)
        self.table, self.dropout = nn.Embedding(6, WIDTH, max_norm=0.5), nn.Dropout(0.2)
        self.register_buffer("kept", None)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average.data.mul_(0.9).add_(x.detach().mean(0))  # leaves the version alone
        kept, self.kept = self.kept, (x.detach().mean(0) if self.kept is None else None)
        rows = self.table(x.detach().abs().long().sum(1) % 6)  # scales them in place
        x = self.dropout(self.norm(self.one(x - self.average + rows))) * self.calls
        self.one, self.other = self.other, self.one
        return x.tanh() if kept is None else (x + kept).tanh()


class Steady(nn.Module):
    """Changes nothing: after some calls all of it is compared at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.dropout = linear(), linear(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.other(self.dropout(self.one(x)).tanh())
        return result


def change_dropout(module: Any) -> None:
    module.dropout.p = 0.9 - module.dropout.p


def replace_layer(module: Any) -> None:
    module.one, module.other = module.other, linear().double()


def lazy() -> nn.Module:
    """Make a module that makes its weights in its first call."""
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())


@pytest.mark.parametrize(
    ("make", "between"),
    [
        *[(make, between) for make in (Habits, Steady) for between in (change_dropout, replace_layer, nn.Module.eval)],
        (lazy, nn.Module.eval),
    ],
)
def test_backward_finds_the_module_as_forward_did(
    make: Callable[[], nn.Module], between: Callable[[Any], object]
) -> None:
    found: list[list[Any]] = []
    for call in (lambda module, x: module(x), smp.checkpoint):
        torch.manual_seed(0)
        module, values = make().double(), []
        for step in range(9):
            x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
            loss = call(module, x).square().sum() + call(module, 2 * x).square().sum()
            weights = list(module.parameters())
            if step > 5:
                between(module)
            module.zero_grad()
            loss.backward()
            module.train()
            values += [x.grad, *[each.grad for each in weights], *[each.clone() for each in module.buffers()]]
        found.append(values)
    for plain, ours in zip(*found, strict=True):
        assert plain is ours or torch.equal(plain, ours)


class Renewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = linear()

    def forward(self, x: Tensor) -> Any:
        self.part = linear()
        return self.part(x)


class Writing(nn.Module):
    """Writes to a large table for the first time after many calls."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1 << 15))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().max()) > 1:
            self.table.add_(1)
        return x.tanh() * self.table[:WIDTH]


def double_weight(module: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


@pytest.mark.parametrize(
    ("module", "between", "message"),
    [
        (linear(), double_weight, "`weight` of a Linear was changed in place between a forward"),
        (Renewing(), lambda module: None, "the forward of a Renewing makes a new `part` in each call"),
        (Writing(), lambda module: None, "`table` of a Writing was changed in place in a forward"),
    ],
)
def test_what_cannot_be_had_back_is_named(module: nn.Module, between: Callable[[Any], object], message: str) -> None:
    for _ in range(3 if isinstance(module, Writing) else 0):
        smp.checkpoint(module, torch.zeros(2, WIDTH, requires_grad=True)).sum().backward()
    loss = smp.checkpoint(module, torch.full((2, WIDTH), 2.0, requires_grad=True)).sum()
    between(module)
    with pytest.raises(UsageError, match=message):
        loss.backward()
