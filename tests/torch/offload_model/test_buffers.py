"""An OffloadModel has the buffers, weights and gradients of the plain model, whatever its layers do to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel
from smpkit.errors import UsageError
from smpkit.testing import EmulatedLink

WIDTH = 4


def models(
    make: Callable[[], nn.Sequential], checkpointing: Sequence[bool] = (False, True)
) -> Iterator[tuple[nn.Sequential, OffloadModel]]:
    for on_device in (False, True):
        for checkpoint in checkpointing:
            for num_slices in (1, 3):
                torch.manual_seed(0)
                plain = make().double()
                links = (EmulatedLink(), EmulatedLink()) if on_device else None
                yield plain, OffloadModel(copy.deepcopy(plain), "cpu", "cpu", num_slices, checkpoint, links=links)


def assert_trains_alike(
    make: Callable[[], nn.Sequential],
    inputs: Callable[[], Tensor] = lambda: torch.randn(3, WIDTH, dtype=torch.float64),
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    change: Callable[[int, nn.Module], object] = lambda step, model: None,
    num_forwards: int = 2,
) -> None:
    for plain, model in models(make):
        optimizers: list[Any] = [optimizer(each.parameters(), lr=0.1) for each in (plain, model)]  # type: ignore[call-arg]
        for step in range(4):
            x = inputs()
            for each, trained in zip((plain, model), optimizers, strict=True):
                change(step, each)
                trained.zero_grad()
                torch.stack([each(x).square().sum() for _ in range(num_forwards)]).sum().backward()
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert one.grad.layout == other.grad.layout
                assert torch.equal(one.grad.to_dense(), other.grad.to_dense())
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


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        result: Tensor = self.linear(x).tanh()
        return result


def clipping() -> nn.Sequential:
    return nn.Sequential(linear(), Clipped(), linear())


def test_weights_that_forward_writes_to_come_home() -> None:
    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    for plain, model in models(clipping, [False]):
        assert all(map(torch.equal, train(plain), train(model)))
        assert (model.traffic.weights_out > 0) == (model._engine.links is not None)


def test_a_forward_that_writes_to_weights_is_not_run_again() -> None:
    for _, model in models(clipping, [True]):
        with pytest.raises(UsageError, match=r"the forward of slice \d changes its weight `.*linear.weight` in place"):
            model(torch.randn(3, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_stay_sparse(optimizer: type[torch.optim.Optimizer]) -> None:
    is_sparse = optimizer is torch.optim.SparseAdam

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(6, WIDTH, sparse=True), *([] if is_sparse else [linear()]))

    assert_trains_alike(make, lambda: torch.randint(0, 6, (5,)), optimizer, num_forwards=1)
