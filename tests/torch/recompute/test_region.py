"""Our own saved-tensor hooks: what recomputation computes, when it ends, what it keeps, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError

WIDTH = 6


def inputs() -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


class Runs(nn.Module):
    """Calls a function with its layer and the input, and counts how often it begins and ends."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.function = function
        self.runs = {"begun": iter(range(99)), "ended": iter(range(99))}

    def forward(self, x: Tensor) -> Tensor:
        next(self.runs["begun"])
        made = self.function(self.layer, x)
        next(self.runs["ended"])
        return made

    def counts(self) -> tuple[int, int]:
        begun, ended = self.runs.values()
        return next(begun), next(ended)


def gradients(call: Callable[..., Tensor], function: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor | None]:
    module, x = Runs(function), inputs()
    torch.manual_seed(2)
    call(module, x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def plainly(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def as_plain(function: Callable[[nn.Module, Tensor], Tensor]) -> bool:
    ours, plain = gradients(smp.checkpoint, function), gradients(plainly, function)
    return all(left is right if left is None else torch.equal(left, right) for left, right in zip(ours, plain))  # type: ignore[arg-type] # noqa: B905


def sine(layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = layer(x).sin()
    return made


class SavesForTwo(torch.autograd.Function):
    """Asks for what it has saved more than once in one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        made: Tensor = gradient * (first + second)
        return made


def backward_inside(layer: nn.Module, x: Tensor) -> Tensor:
    y = torch.dropout(layer(x).sin(), 0.5, True)
    (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.square().sum(), x)
    made: Tensor = layer(x) * slope * again
    return made


def catches(layer: nn.Module, x: Tensor) -> Tensor:
    try:
        return sine(layer, x)
    except Exception:
        return x


def cleans_up(layer: nn.Module, x: Tensor) -> Tensor:
    try:
        return sine(layer, x)
    except BaseException:
        sine(layer, x)
        raise


@pytest.mark.parametrize(
    "function", [lambda layer, x: SavesForTwo.apply(layer(x)), backward_inside, catches, cleans_up]
)
def test_gradients_are_those_of_a_plain_call(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert as_plain(function)


def test_recomputation_ends_with_the_last_saved_tensor() -> None:
    module = Runs(sine)
    smp.checkpoint(module, inputs()).sum().backward()
    assert module.counts() == (2, 1)


def two_results(layer: nn.Module, x: Tensor) -> Any:
    return layer(x).sin(), layer(x * 2)


def test_a_second_backward_takes_what_the_first_has_left() -> None:
    module, x = Runs(two_results), inputs()
    first, second = smp.checkpoint(module, x)
    first.sum().backward()
    second.square().sum().backward()
    assert module.counts() == (2, 1)
    y = inputs()
    plain = Runs(two_results)
    first, second = plain(y)
    (first.sum() + second.square().sum()).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.layer.weight.grad, plain.layer.weight.grad, rtol=1e-12, atol=1e-12)


def test_what_a_first_backward_left_and_others_changed_is_named() -> None:
    module = Runs(two_results)
    first, second = smp.checkpoint(module, inputs())
    first.sum().backward()
    with torch.no_grad():
        module.layer.weight.zero_()
    with pytest.raises(UsageError, match="a tensor that `Runs` saved for backward was changed in place"):
        second.square().sum().backward()


class Box:
    """A value that recomputation does not restore."""

    def __init__(self) -> None:
        self.value = 0


def test_a_forward_that_saves_other_tensors_is_named() -> None:
    box = Box()
    module = Runs(lambda layer, x: layer(x)[box.value :].sin())
    loss = smp.checkpoint(module, inputs()).sum()
    box.value = 1
    expected = (
        r"(?s)forward of `Runs` again.*tensor 2 that it saves was float64\[3, 6\] on cpu, and now is float64\[2, 6\]"
    )
    with pytest.raises(UsageError, match=expected):
        loss.backward()


def test_a_forward_that_saves_fewer_tensors_is_named() -> None:
    box = Box()
    module = Runs(lambda layer, x: layer(x) if box.value else layer(x).sin())
    loss = smp.checkpoint(module, inputs()).sum()
    box.value = 1
    with pytest.raises(UsageError, match=r"forward of `Runs` again.*it saves 2 tensors instead of 3"):
        loss.backward()


def test_an_input_that_the_layer_changes_is_named() -> None:
    with pytest.raises(UsageError, match="a tensor that `Runs` saved for backward was changed in place"):
        smp.checkpoint(Runs(lambda layer, x: layer(x.mul_(2))), inputs() * 1).sum().backward()


def test_an_input_that_others_change_before_backward_is_named() -> None:
    x = inputs() * 1
    loss = smp.checkpoint(Runs(sine), x).sum()
    x.detach().zero_()
    with pytest.raises(UsageError, match="a tensor that `Runs` saved for backward was changed in place"):
        loss.backward()


def test_an_input_that_an_outer_checkpoint_changes_is_named() -> None:
    """Without a word, torch's own would compute with the changed values."""
    inner = Runs(sine)

    def outer(layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        made = smp.checkpoint(inner, y)
        y.detach().mul_(2)
        return made.sin()

    with pytest.raises(UsageError, match="a tensor that `Runs` saved for backward was changed in place"):
        smp.checkpoint(Runs(outer), inputs()).sum().backward()


def test_factories_make_tensors_where_the_forward_has() -> None:
    module, x = Runs(lambda layer, x: layer(x).sin() * torch.ones(WIDTH).shape[0]), inputs()
    seen: list[torch.device] = []
    module.function = lambda layer, x: (seen.append(torch.empty(1).device), layer(x).sin())[1]  # type: ignore[func-returns-value]
    with torch.device("meta"):
        loss = smp.checkpoint(module, x).sum()
    loss.backward()
    assert [device.type for device in seen] == ["meta", "meta"]
    with torch.device("meta"):
        smp.checkpoint(module, x).sum().backward()
    assert [device.type for device in seen[2:]] == ["meta", "meta"]


def test_no_cycle_keeps_a_call() -> None:
    module, x = Runs(sine), inputs() * 1
    smp.checkpoint(module, x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        x = inputs() * 1
        loss = smp.checkpoint(module, x).sum()
        kept = weakref.ref(x)
        loss.backward()
        del x, loss
        assert kept() is None
    finally:
        gc.enable()
