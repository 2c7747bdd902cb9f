"""What a checkpointed call keeps is its boundary: all of it, once, nothing else, and through the ambient hooks only."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import smpkit.torch as smp
from smpkit.torch.core import offload_hooks as active

WIDTH, BATCH = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None, extra: Any = None) -> Tensor:
        x = x + self.shrink(torch.tanh(self.grow(self.norm(x))))
        x = x if mask is None else x.masked_fill(mask, 0.0)
        x = x if extra is None else x * extra["factors"][0]
        return x if self.scale is None else x * self.scale


@contextlib.contextmanager
def hooks() -> Iterator[list[Tensor]]:
    """Note what autograd keeps."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel():  # until 2.12, torch's checkpoint keeps an empty tensor of its own
            kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_trap_23_every_tensor_that_goes_in_is_kept_once() -> None:
    block, x = Block(), torch.randn(BATCH, WIDTH, requires_grad=True)
    mask, factor = x.detach() > 0, torch.rand(WIDTH)
    with hooks() as kept:
        smp.checkpoint(block, x, mask=mask, extra={"factors": [factor, x, 3], "weight": block.grow.weight})
    assert addresses(kept) == addresses([x, mask, factor])


def test_trap_24_what_one_layer_returns_and_the_next_takes_is_kept_once() -> None:
    stack = nn.Sequential(*[Block() for _ in range(5)])
    smp.set_activation_checkpointing(stack)
    outputs: list[Tensor] = []
    for layer in stack:
        layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    x = torch.randn(BATCH, WIDTH)
    with hooks() as kept:
        stack(x)
    assert addresses(kept) == addresses([x, *outputs[:4]])


class Watch(TorchDispatchMode):
    """Notes the memory of all tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, tuple | list) else [output]:
            if isinstance(each, Tensor):
                self.storages[each.untyped_storage()._cdata] = each.untyped_storage()
        return output

    def bytes_alive(self) -> int:
        # One use is that of the note; a tensor that is alive in Python or in a graph is another.
        alive = [key for key in self.storages if torch._C._storage_Use_Count(key) > 1]
        return sum(self.storages[key].nbytes() for key in alive)


def bytes_kept(call: Callable[[], Tensor], *others: Tensor) -> int:
    """Return the bytes of what a call makes and leaves alive, views of weights not counted."""
    with Watch() as watch:
        output = call()
    assert output.requires_grad
    for each in others:
        watch.storages.pop(each.untyped_storage()._cdata, None)
    return watch.bytes_alive()


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_what_stays_alive_after_forward_is_the_boundaries(strategy: str) -> None:
    stack = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(4)])
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    offload_inputs = x.numel() * x.element_size()
    groups = {"each": 4, "contiguous": 1, "group_2": 2}[strategy]
    plain = bytes_kept(lambda: stack(x), x, *stack.parameters())
    ours = bytes_kept(lambda: smp.checkpoint_sequential(stack, x, strategy), x, *stack.parameters())
    assert ours == groups * offload_inputs  # the inputs but `x`, which was there before, and the output
    assert plain > 8 * 4 * offload_inputs


def test_when_backward_is_done_nothing_is_alive() -> None:
    block = Block()
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    y = 2 * x
    offload_inputs = weakref.ref(y.untyped_storage())
    loss = smp.checkpoint(block, y).sum()
    del y
    loss.backward()
    del loss
    gc.collect()
    assert offload_inputs() is None or torch._C._storage_Use_Count(offload_inputs()._cdata) == 0  # type: ignore[union-attr]


class Names(active.Offloader):
    """Notes around what it is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def offload_inputs(self, name: str) -> Iterator[None]:
        with hooks() as kept:
            yield
        self.seen.append((name, len(kept)))


@pytest.fixture
def names() -> Iterator[Names]:
    names = Names()
    before = active.install(names)
    yield names
    active.install(before)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"h": nn.Sequential(*[Block() for _ in range(4)])})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.transformer["h"](x)
        return result


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("strategy", "layers"), [("each", "0123"), ("group_3", "03"), ("contiguous", "0")])
def test_offloading_learns_the_paths_of_layers(names: Names, strategy: str, layers: str) -> None:
    smp.init({})
    model = smp.DistributedModel(Model())
    smp.set_activation_checkpointing(model.get_module().get_submodule("transformer.h"), strategy=strategy)
    model(torch.randn(BATCH, WIDTH)).sum().backward()
    assert names.seen == [(f"transformer.h.{layer}", 1) for layer in layers]


def test_what_an_outer_checkpoint_makes_again_is_not_offloaded(names: Names) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = smp.checkpoint(self.inner, 2 * x)
            return result

    smp.checkpoint(Outer(), torch.randn(BATCH, WIDTH, requires_grad=True)).sum().backward()
    assert names.seen == [("Outer", 1)]


def test_trap_21_evaluation_is_not_offloaded(names: Names) -> None:
    with torch.no_grad():
        smp.checkpoint(Block(), torch.randn(BATCH, WIDTH))
    smp.checkpoint(Block().requires_grad_(False), torch.randn(BATCH, WIDTH))
    assert names.seen == []
