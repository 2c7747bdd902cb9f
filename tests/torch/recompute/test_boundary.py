"""What a checkpointed call keeps is its boundary: all of it, once, nothing else, and parked with what is installed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.core import offloader
from smpkit.torch.core.offloader import Offloader, Parked

WIDTH, BATCH = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, extra: Any = None) -> Tensor:
        return x + self.shrink(torch.tanh(self.grow(self.norm(x))))


class Noting(Offloader):
    """Keeps, and notes what it is given."""

    def __init__(self) -> None:
        self.parked: list[tuple[str, list[Tensor]]] = []
        self.around_calls: list[str] = []

    def park(self, name: str, tensors: Iterable[Tensor]) -> Parked:
        self.parked.append((name, list(tensors)))
        return super().park(name, self.parked[-1][1])

    def around(self, name: str) -> AbstractContextManager[object]:
        self.around_calls.append(name)
        return contextlib.nullcontext()

    def sizes(self) -> list[tuple[str, int]]:
        return [(name, len(tensors)) for name, tensors in self.parked]


@pytest.fixture
def keeper() -> Iterator[Noting]:
    noting = Noting()
    before = offloader.install(noting)
    yield noting
    offloader.install(before)


def ids(tensors: Iterable[Tensor]) -> list[int]:
    return [id(tensor) for tensor in tensors]


def test_every_tensor_that_goes_in_is_kept_once_and_no_weight(keeper: Noting) -> None:
    block, x, factor = Block(), torch.randn(BATCH, WIDTH, requires_grad=True), torch.rand(WIDTH)
    mask = x.detach() > 0
    smp.checkpoint(block, x, mask=mask, extra={"factors": [factor, x, 3], "weight": block.grow.weight})
    assert ids(keeper.parked[0][1]) == ids([x, mask, factor])


def test_what_one_layer_returns_and_the_next_takes_is_the_same_tensor(keeper: Noting) -> None:
    stack, outputs = nn.Sequential(*[Block() for _ in range(5)]), list[Tensor]()
    smp.set_activation_checkpointing(stack)
    for layer in stack:
        layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    x = torch.randn(BATCH, WIDTH)
    stack(x)
    assert ids(tensor for _, tensors in keeper.parked for tensor in tensors) == ids([x, *outputs[:4]])


@pytest.mark.parametrize(("strategy", "groups"), [("each", 4), ("contiguous", 1), ("group_2", 2)])
def test_what_the_graph_keeps_is_the_boundaries(keeper: Noting, strategy: str, groups: int) -> None:
    stack, saved = nn.Sequential(*[Block() for _ in range(4)]), list[weakref.ref[Tensor]]()
    for module in stack.modules():
        if not isinstance(module, Block | nn.Sequential):
            module.register_forward_hook(lambda _, __, output: saved.append(weakref.ref(output)))
    output = smp.checkpoint_sequential(stack, torch.randn(BATCH, WIDTH), strategy)
    assert len(keeper.parked) == groups
    assert output.requires_grad
    assert [each() for each in saved] == [None] * 12
    plain = stack(torch.randn(BATCH, WIDTH))
    assert plain.requires_grad
    assert [each() is not None for each in saved[12:]] == [True, False, False] * 4  # the outputs of norms


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"h": nn.Sequential(*[Block() for _ in range(4)])})

    def forward(self, x: Tensor) -> Any:
        return self.transformer["h"](x)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("strategy", "layers"), [("each", "0123"), ("group_3", "03"), ("contiguous", "0")])
def test_the_keeper_learns_the_paths_of_layers(keeper: Noting, strategy: str, layers: str) -> None:
    smp.init({})
    model = smp.DistributedModel(Model())
    smp.set_activation_checkpointing(model.get_module().get_submodule("transformer.h"), strategy=strategy)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert keeper.sizes() == [(f"transformer.h.{layer}", 1) for layer in layers]
    assert keeper.around_calls == [name for name, _ in keeper.sizes()]


def test_what_an_outer_checkpoint_makes_again_is_not_kept_twice(keeper: Noting) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Any:
            return smp.checkpoint(self.inner, 2 * x)

    smp.checkpoint(Outer(), torch.randn(BATCH, WIDTH, requires_grad=True)).sum().backward()
    assert keeper.sizes() == [("Outer", 1)]


def test_evaluation_and_frozen_stems_keep_nothing(keeper: Noting) -> None:
    with torch.no_grad():
        smp.checkpoint(Block(), torch.randn(BATCH, WIDTH))
    smp.checkpoint(Block().requires_grad_(False), torch.randn(BATCH, WIDTH))
    assert keeper.parked == []
