"""How a call is run again: when that begins and ends, what is kept for it, and what cannot be repeated is named."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.core import offloader
from smpkit.torch.core.offloader import Offloader, Parked
from tests.torch.recompute.layers import WIDTH, Call, Layer, batch, plainly, same


def sine(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).sin()


def test_recomputation_ends_with_the_last_saved_tensor() -> None:
    begun, ended = list[int](), list[int]()

    def run(layer: Any, x: Tensor) -> Tensor:
        begun.append(1)
        y = sine(layer, x)
        ended.append(1)
        return y

    smp.checkpoint(Layer(run).double(), batch()).sum().backward()
    assert (len(begun), len(ended)) == (2, 1)


def test_a_weight_that_is_an_argument_and_changes_is_named() -> None:
    layer, weight = (
        Layer(lambda layer, x, weight: layer.linear(x) @ weight).double(),
        nn.Parameter(batch(WIDTH).detach()),
    )
    loss = smp.checkpoint(layer, batch(), weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(UsageError, match="a weight of `Layer` was changed in place"):
        loss.backward()


def two_results(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    layer.runs.append(1)
    return layer.linear(x).sin(), layer.linear(x * 2)


def test_a_second_backward_takes_what_the_first_has_left() -> None:
    found = []
    for call in (smp.checkpoint, plainly):
        torch.manual_seed(1)
        runs = list[int]()
        layer, x = Layer(two_results, runs=runs).double(), batch()
        first, second = call(layer, x)
        first.sum().backward()
        second.square().sum().backward()
        found.append([x.grad, *(weight.grad for weight in layer.parameters())])
        assert len(runs) == (2 if call is smp.checkpoint else 1)
    assert same(*found)


def test_what_a_first_backward_left_and_others_changed_is_named() -> None:
    layer = Layer(two_results, runs=[]).double()
    first, second = smp.checkpoint(layer, batch())
    first.sum().backward()
    with torch.no_grad():
        layer.linear.weight.zero_()
    with pytest.raises(UsageError, match="a tensor that `Layer` saved for backward was changed in place"):
        second.square().sum().backward()


# --- what cannot be repeated ------------------------------------------------------------------------------------------


def cut(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x)[layer.number :].sin()


def perhaps(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x) if layer.number else sine(layer, x)


def drawing(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x) * torch.rand(x.shape, generator=layer.number, dtype=x.dtype)


@pytest.mark.filterwarnings("ignore:`number` of a Layer has changed")
@pytest.mark.parametrize(
    ("act", "number", "message"),
    [
        (cut, 0, r"tensor 2 that it saves was float64\[3, 4\] on cpu, and now is float64\[2, 4\]"),
        (perhaps, 0, "it saves 2 tensors instead of 3"),
        (drawing, torch.Generator(), r"tensor 2 that it saves was float64\[3, 4\] on cpu \(CRC"),
    ],
    ids=["others", "fewer", "with other contents"],
)
def test_a_forward_that_saves_other_tensors_is_named(
    act: Call, number: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = Layer(act, number=number).double()
    if act is drawing:
        smp.checkpoint(layer, batch()).sum().backward()  # without a word, as in torch
        monkeypatch.setenv("SMPKIT_CHECK", "1")
    loss = smp.checkpoint(layer, batch()).sum()
    layer.number = 1 if act is not drawing else number
    with pytest.raises(UsageError, match=f"(?s)ran the forward of `Layer` again.*{message}"):
        loss.backward()


def by_the_layer(x: Tensor) -> Tensor:
    return smp.checkpoint(Layer(lambda layer, x: layer.linear(x.mul_(2))).double(), x)


def by_others(x: Tensor) -> Tensor:
    y = smp.checkpoint(Layer(sine).double(), x)
    x.detach().zero_()
    return y


def by_an_outer_checkpoint(x: Tensor) -> Tensor:
    """Without a word, torch's own would compute with the changed values."""

    def outer(layer: Any, x: Tensor) -> Tensor:
        y = layer.linear(x)
        made = smp.checkpoint(layer.inner, y)
        y.detach().mul_(2)
        return made.sin()

    return smp.checkpoint(Layer(outer, inner=Layer(sine)).double(), x)


@pytest.mark.parametrize("changed", [by_the_layer, by_others, by_an_outer_checkpoint])
def test_an_input_that_changes_is_named(changed: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UsageError, match="a tensor that `Layer` saved for backward was changed in place"):
        changed(batch() * 1).sum().backward()


def later(layer: Any, x: Tensor) -> Tensor:
    if x.detach().max() > 2:
        layer.average.add_(1)
    return layer.linear(x * layer.average.exp()).tanh()


def scaled(layer: Any, x: Tensor) -> Tensor:
    double_weight(layer)
    return sine(layer, x)


def double_weight(layer: Any) -> None:
    with torch.no_grad():
        layer.linear.weight.mul_(2)


def call_again(layer: Any) -> None:
    smp.checkpoint(layer, torch.full((2, WIDTH), 99.0))


@pytest.mark.parametrize(
    ("act", "size", "between", "message"),
    [
        (later, 99.0, None, "`average` of a Layer was changed in place in a forward that is to be run again"),
        (later, 0.0, call_again, "`average` of a Layer was changed in place between a forward and its backward"),
        (sine, 1.0, double_weight, "`linear.weight` of `Layer` was changed in place"),
        (scaled, 1.0, None, "`linear.weight` of `Layer` was changed in place"),
    ],
    ids=["a buffer, late", "a buffer, by another call", "a weight, by the script", "a weight, by the forward"],
)
def test_what_is_written_too_late_is_an_error_that_names_it(
    act: Call, size: float, between: Callable[[Any], None] | None, message: str
) -> None:
    layer = Layer(act, average=torch.ones(WIDTH))
    if act is later:
        smp.checkpoint(layer, torch.zeros(2, WIDTH)).sum().backward()
    loss = smp.checkpoint(layer, torch.full((2, WIDTH), size)).sum()
    if between is not None:
        between(layer)
    with pytest.raises(UsageError, match=message):
        loss.backward()
    if size == 99:  # from now on there are copies
        smp.checkpoint(layer, torch.full((2, WIDTH), size)).sum().backward()


# --- what is kept -----------------------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts copies of buffers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default and args[0].shape == (WIDTH,)
        return func(*args, **(kwargs or {}))


def test_what_will_not_run_again_is_not_copied() -> None:
    layer, x = Layer(later, average=torch.ones(WIDTH)), torch.zeros(2, WIDTH)
    with Copies() as copies:
        smp.checkpoint(layer.requires_grad_(False), x)  # a frozen stem
        assert copies.count == 0
        layer.requires_grad_()
        smp.checkpoint(layer, x)
        first = copies.count
        assert first > 0
        for _ in range(2):
            smp.checkpoint(layer, x)
        assert copies.count == first  # nobody writes to it


@pytest.mark.usefixtures("no_search_for_cycles")
def test_no_cycle_keeps_a_call() -> None:
    layer = Layer(sine).double()
    for _ in range(2):
        x = batch() * 1
        loss, kept = smp.checkpoint(layer, x).sum(), weakref.ref(x)
        loss.backward()
        del x, loss
        assert kept() is None


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
    smp.init({})  # `wrap` would take the keeper away, where a model of before is shut down
    model = smp.DistributedModel(nn.Sequential(nn.Sequential(*[block() for _ in range(4)])))
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
