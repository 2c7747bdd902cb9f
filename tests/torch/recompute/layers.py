"""A layer that does what it is told, and what to compare of its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Does

WIDTH = 4
Call = Callable[..., Any]


class Layer(Does):
    """Does what a function says with a linear layer, and with what it is given."""

    linear: nn.Linear

    def __init__(self, act: Call, **parts: Any) -> None:
        super().__init__(act, linear=nn.Linear(WIDTH, WIDTH), **parts)


def plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def batch(length: int = 3) -> Tensor:
    return torch.randn(length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def gradients(module: nn.Module, call: Call = plainly) -> list[Tensor | None]:
    torch.manual_seed(4)
    module.zero_grad()
    x = batch()
    call(module, x).square().sum().backward()
    return [x.grad, *(weight.grad for weight in module.parameters())]


def same(ours: list[Any], plain: list[Any]) -> bool:
    """Return whether tensors have the same bits, and other things are the same."""
    return all(left is right or torch.equal(left, right) for left, right in zip(ours, plain, strict=True))
