"""An OffloadModel has the buffers, weights and gradients of the plain model, whatever its layers do to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel

WIDTH = 4
pytestmark = pytest.mark.usefixtures("place")


def models(make: Callable[[], nn.Sequential]) -> Iterator[tuple[nn.Sequential, OffloadModel]]:
    for checkpoint in (False, True):
        for num_slices in (1, 3):
            torch.manual_seed(0)
            plain = make().double()
            yield plain, OffloadModel(copy.deepcopy(plain), "cpu", "cpu", num_slices, checkpoint)


def assert_trains_alike(
    make: Callable[[], nn.Sequential],
    change: Callable[[int, nn.Module], object] = lambda step, model: None,
) -> None:
    for plain, model in models(make):
        optimizers: list[Any] = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(4):
            x = torch.randn(3, WIDTH, dtype=torch.float64)
            for each, trained in zip((plain, model), optimizers, strict=True):
                change(step, each)
                trained.zero_grad()
                torch.stack([each(x).square().sum() for _ in range(2)]).sum().backward()
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert torch.equal(one.grad, other.grad)
            for trained in optimizers:
                trained.step()
            pairs = zip([*plain.parameters(), *plain.buffers()], [*model.parameters(), *model.buffers()], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def freeze(step: int, norm: Any) -> None:
    norm.train(step > 1)


def without_momentum(step: int, norm: Any) -> None:
    norm.momentum = 0.1 if step > 1 else 0.0


@pytest.mark.parametrize("set_norm", [freeze, without_momentum])
def test_a_norm_whose_statistics_change_later(set_norm: Callable[[int, Any], None]) -> None:
    def change(step: int, model: nn.Module) -> None:
        for each in model.modules():
            if isinstance(each, nn.BatchNorm1d):
                set_norm(step, each)

    assert_trains_alike(lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()), change=change)


class Forgetful(nn.Module):
    memory: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None:
            return x
        x, self.memory = x * self.memory * 2, None
        return x


def test_a_buffer_that_forward_sets_to_none() -> None:
    assert_trains_alike(lambda: nn.Sequential(linear(), Forgetful(), linear()))


def test_sparse_gradients_may_become_dense() -> None:
    tokens = torch.randint(0, 6, (5,))
    for plain, model in models(lambda: nn.Sequential(nn.Embedding(6, WIDTH, sparse=True), linear())):
        for each in (plain, model):
            each(tokens).square().sum().backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad.to_dense(), other.grad.to_dense())
