"""An OffloadModel has the buffers, weights and gradients of the plain model, whatever its layers do to them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smpkit import OffloadModel
from smpkit.errors import UsageError
from smpkit.testing import EmulatedLink
from smpkit.torch.offload import activations

WIDTH = 4


def models(make: Callable[[], nn.Sequential]) -> Iterator[tuple[nn.Sequential, OffloadModel]]:
    for on_device in (False, True):
        for checkpoint in (False, True):
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


def test_a_norm_that_is_frozen_first_and_trained_later() -> None:
    def change(step: int, model: nn.Module) -> None:
        for each in model.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.train(step > 1)

    assert_trains_alike(lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()), change=change)


def test_a_norm_without_momentum_first() -> None:
    def change(step: int, model: nn.Module) -> None:
        for each in model.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.momentum = 0.1 if step > 1 else 0.0

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


def test_weights_that_forward_writes_to_come_home() -> None:
    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    for plain, model in models(lambda: nn.Sequential(linear(), Clipped(), linear())):
        assert all(map(torch.equal, train(plain), train(model)))
        links = model._engine.links
        assert (model.traffic.weights_out > 0) == (links is not None)


def test_an_embedding_that_scales_its_rows() -> None:
    assert_trains_alike(
        lambda: nn.Sequential(nn.Embedding(6, WIDTH, max_norm=0.5), linear(), nn.Tanh()),
        lambda: torch.randint(0, 6, (5,)),
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_stay_sparse(optimizer: type[torch.optim.Optimizer]) -> None:
    is_sparse = optimizer is torch.optim.SparseAdam

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(6, WIDTH, sparse=True), *([] if is_sparse else [linear()]))

    assert_trains_alike(make, lambda: torch.randint(0, 6, (5,)), optimizer, num_forwards=1)


def test_two_threads_at_once_are_refused() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert leave.wait(60)
            return x

    model = OffloadModel(nn.Sequential(linear(), Waits(), linear()), "cpu")
    thread = threading.Thread(target=lambda: model(torch.randn(2, WIDTH)), name="first")
    thread.start()
    assert inside.wait(60)
    with pytest.raises(UsageError, match="at once: `MainThread` called it while `first` was in its forward"):
        model(torch.randn(2, WIDTH))
    leave.set()
    thread.join(60)
    model(torch.randn(2, WIDTH)).sum().backward()


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "bfloat16"},
        {"balance": None},
        {"balance": [float("nan"), 1]},
        {"device": "nowhere"},
        {"device": "cpu:1"},
        {"offload_device": "nowhere"},
        {"host_budget_bytes": -1},
        {"host_budget_bytes": "1"},
        {"host_budget_bytes": 1.5},
        {"host_budget_bytes": True},
        {"checkpoint_activation": "yes"},
        {"checkpoint_activation": None},
        {"prefetch": "no"},
        {"links": 3},
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_with_its_value(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError) as caught:
        OffloadModel(nn.Sequential(linear(), linear()), **{"device": "cpu", **given})
    assert str(caught.value).startswith(name)
    assert value is None or str(value).strip("[]") in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        *({"min_bytes": value} for value in (-1, 1.5, "a")),
        *({"host_budget_bytes": value} for value in (True, "1G")),
        *({"deadline_seconds": value} for value in (float("nan"), "x", 0, True)),
        {"link": 3},
    ],
    ids=str,
)
def test_a_wrong_argument_of_activations_is_named_with_its_value(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError) as caught:
        activations(linear(), **given)
    assert str(caught.value).startswith(f"{name} is {value!r}")


def test_activations_of_a_checkpointed_sequential_leave_layer_by_layer() -> None:
    from smpkit.torch import set_activation_checkpointing

    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    set_activation_checkpointing(model)
    offload = activations(model, lead=1, min_bytes=0, link=EmulatedLink())
    assert len(offload._layers) == 8
    with offload:
        loss = model(torch.randn(32, 64, requires_grad=True)).sum()
    loss.backward()
    step = offload.report().steps[-1]
    assert step.bytes_back > 0
    offload.close()
