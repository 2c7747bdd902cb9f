"""What a checkpointed call keeps is its boundary: all of it, once, nothing else, and parked with what is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.core import offloader
from smpkit.torch.core.offloader import Offloader, Parked
from tests.torch.recompute.layers import WIDTH, Layer


def block() -> nn.Module:
    return Layer(lambda layer, x, mask=None, extra=None: x + layer.linear(layer.norm(x)), norm=nn.BatchNorm1d(WIDTH))


class Noting(Offloader):
    """Keeps, and notes what it is given."""

    def __init__(self) -> None:
        self.parked: list[tuple[str, list[Tensor]]] = []

    def park(self, name: str, tensors: Iterable[Tensor]) -> Parked:
        self.parked.append((name, list(tensors)))
        return super().park(name, self.parked[-1][1])


@pytest.fixture
def keeper() -> Iterator[Noting]:
    noting = Noting()
    before = offloader.install(noting)
    yield noting
    offloader.install(before)


def ids(tensors: Iterable[Any]) -> list[int]:
    return [id(tensor) for tensor in tensors]


def test_every_tensor_that_goes_in_is_kept_once_and_no_weight(keeper: Noting) -> None:
    layer, x, factor = block(), torch.randn(3, WIDTH, requires_grad=True), torch.rand(WIDTH)
    mask = x.detach() > 0
    weight = layer.get_parameter("linear.weight")
    smp.checkpoint(layer, x, mask=mask, extra={"factors": [factor, x, 3], "weight": weight})
    assert ids(keeper.parked[0][1]) == ids([x, mask, factor])


def test_what_one_layer_returns_and_the_next_takes_is_the_same_tensor(keeper: Noting) -> None:
    stack, outputs = nn.Sequential(*[block() for _ in range(5)]), list[Tensor]()
    smp.set_activation_checkpointing(stack)
    for layer in stack:
        layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    x = torch.randn(3, WIDTH)
    stack(x)
    assert ids(tensor for _, tensors in keeper.parked for tensor in tensors) == ids([x, *outputs[:4]])


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("strategy", "layers"), [("each", "0123"), ("group_3", "03"), ("contiguous", "0")])
def test_the_keeper_learns_the_paths_of_layers(keeper: Noting, strategy: str, layers: str) -> None:
    smp.init({})
    stack = nn.Sequential(*[block() for _ in range(4)])
    model = smp.DistributedModel(nn.Sequential(stack))
    smp.set_activation_checkpointing(model.get_module().get_submodule("0"), strategy=strategy)
    model(torch.randn(3, WIDTH)).sum().backward()
    assert [(name, len(tensors)) for name, tensors in keeper.parked] == [(f"0.{layer}", 1) for layer in layers]


def test_what_an_outer_checkpoint_makes_again_is_not_kept_twice(keeper: Noting) -> None:
    outer = Layer(lambda layer, x: smp.checkpoint(layer.inner, 2 * x), inner=block())
    smp.checkpoint(outer, torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
    assert [(name, len(tensors)) for name, tensors in keeper.parked] == [("Layer", 1)]


def test_evaluation_and_frozen_stems_keep_nothing(keeper: Noting) -> None:
    with torch.no_grad():
        smp.checkpoint(block(), torch.randn(3, WIDTH))
    smp.checkpoint(block().requires_grad_(False), torch.randn(3, WIDTH))
    assert keeper.parked == []
