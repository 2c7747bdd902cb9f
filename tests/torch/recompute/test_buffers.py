"""A checkpointed forward that writes to buffers trains as a plain one; what it must not do is found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.core import buffers
from smpkit.torch.core.runtime import state

WIDTH = 4
Act = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """Calls a function with itself and what its linear layer computes."""

    def __init__(self, act: Act, **attributes: Any) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), act
        for name, value in attributes.items():
            self.register_buffer(name, value) if isinstance(value, Tensor) else setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x)).tanh()


def in_place(layer: Any, x: Tensor) -> Tensor:
    layer.average.mul_(0.9).add_(x.detach().mean(0))
    return x - layer.average


def replaced(layer: Any, x: Tensor) -> Tensor:
    layer.average = 0.9 * layer.average + x.detach().mean(0)
    return x - layer.average


def now_and_then(layer: Any, x: Tensor) -> Tensor:
    """Keep something in each other call: a buffer that is None comes and goes."""
    layer.kept, kept = (x.detach().mean(0) if layer.kept is None else None), layer.kept
    return x if kept is None else x * kept.exp()


def rotated(layer: Any, x: Tensor) -> Tensor:
    """Build a table anew for a longer sequence, as GPT-NeoX's rotary embedding does."""
    if len(x) > layer.length:
        layer.length, layer.average = len(x), torch.arange(len(x) * WIDTH, dtype=x.dtype).view(-1, WIDTH)
    return x * layer.average[: len(x)].cos()


class Instances(nn.InstanceNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.T[None])[0].T


class Renormed(nn.BatchNorm1d):
    """Reads in training what torch's norms only write."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.exp(self.running_var)  # type: ignore[arg-type]


def backward_inside(layer: Any, x: Tensor) -> Tensor:
    y = smp.checkpoint(layer.inner, x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return in_place(layer, y * slope)


def average() -> Tensor:
    return torch.ones(WIDTH)


def with_none() -> nn.Module:
    layer = Layer(now_and_then)
    layer.register_buffer("kept", None)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm, cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "BatchNorm that is frozen": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(WIDTH),
    "InstanceNorm": lambda: Instances(WIDTH, track_running_stats=True),
    "a norm of the user's": lambda: Renormed(WIDTH),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "written in place": lambda: Layer(in_place, average=average()),
    "replaced": lambda: Layer(replaced, average=average()),
    "None, then a tensor": with_none,
    "a table that is built anew": lambda: Layer(rotated, average=torch.zeros(0, WIDTH), length=0),
    "a backward in the forward": lambda: Layer(
        backward_inside, average=average(), inner=Layer(in_place, average=average())
    ),
}


class Outer(nn.Module):
    """Calls a layer in a layer, both through `call`."""

    def __init__(self, inner: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.call = nn.Linear(WIDTH, WIDTH), inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, self.first(x)).sin()


def plainly(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def trained(make: Callable[[], nn.Module], call: Callable[..., Tensor], inner: Callable[..., Tensor]) -> list[Any]:
    """Return gradients and buffers of steps that call a module twice, and walk the graph twice."""
    torch.manual_seed(0)
    module, values = Outer(make(), inner).double(), list[Any]()
    for length in (4, 6, 4, 8):
        x = torch.randn(length, WIDTH, dtype=torch.float64, requires_grad=True)
        loss = call(module, x).square().sum() + call(module, 2 * x).sin().sum()
        module.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        values += [x.grad, *[each.grad for each in module.parameters()], *[each.clone() for each in module.buffers()]]
    return values


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("which", ["inner", "outer", "both", "both, checked"])
def test_a_layer_that_changes_its_buffers_trains_as_a_plain_one(
    name: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMPKIT_CHECK", "1" if "checked" in which else "0")
    calls = [plainly if which == other else smp.checkpoint for other in ("inner", "outer")]
    pairs = zip(trained(LAYERS[name], *calls), trained(LAYERS[name], plainly, plainly), strict=True)
    assert all(ours is plain or torch.equal(ours, plain) for ours, plain in pairs)


# --- what cannot be repeated ------------------------------------------------------------------------------------------


def later(layer: Any, x: Tensor) -> Tensor:
    if x.detach().max() > 2:
        layer.average.add_(1)
    return x * layer.average.exp()


def scaled(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.linear.weight.mul_(0.9)
    return x


def double_weight(layer: Any) -> None:
    with torch.no_grad():
        layer.linear.weight.mul_(2)


def call_again(layer: Any) -> None:
    smp.checkpoint(layer, torch.full((2, WIDTH), 99.0))


def nothing(layer: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("act", "size", "between", "message"),
    [
        (later, 99.0, nothing, "`average` of a Layer was changed in place in a forward that is to be run again"),
        (later, 0.0, call_again, "`average` of a Layer was changed in place between a forward and its backward"),
        (in_place, 1.0, double_weight, "of `Layer` was changed in place"),
        (scaled, 1.0, nothing, "of `Layer` was changed in place"),
    ],
    ids=["a buffer, late", "a buffer, by another call", "a weight, by the script", "a weight, by the forward"],
)
def test_what_is_written_too_late_is_an_error_that_names_it(
    act: Act, size: float, between: Callable[[Any], None], message: str
) -> None:
    layer = Layer(act, average=average())
    with torch.no_grad():
        layer.linear.weight.copy_(torch.eye(WIDTH))
    if act is later:
        smp.checkpoint(layer, torch.zeros(2, WIDTH)).sum().backward()
    loss = smp.checkpoint(layer, torch.full((2, WIDTH), size)).sum()
    between(layer)
    with pytest.raises(UsageError, match=message):
        loss.backward()
    if (act, between) == (later, nothing):  # from now on there are copies
        smp.checkpoint(layer, torch.full((2, WIDTH), size)).sum().backward()


def masked(layer: Any, x: Tensor) -> Tensor:
    return x * layer.mask


def counting(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return x * layer.calls


def reporting(layer: Any, x: Tensor) -> Tensor:
    """Set attributes for others to read, as a mixture of experts does with `l_aux`."""
    layer.calls, layer.mask, layer.l_aux, layer.sizes = len(x), None, x.square().mean(), [*x.shape]
    return x * layer.l_aux


@pytest.mark.parametrize(("act", "named"), [(masked, ["mask"]), (counting, ["mask"]), (reporting, [])])
def test_an_attribute_that_changes_until_backward_is_named_once(act: Act, named: list[str]) -> None:
    buffers._warned.clear()
    layer = Layer(act, calls=0, mask=None, l_aux=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            losses = []
            for length in (2, 3, 3):
                if act is not reporting:
                    layer.mask = torch.randn(WIDTH)
                losses.append(smp.checkpoint(layer, torch.randn(length, WIDTH)).sum())
            torch.stack(losses).sum().backward()
    assert sorted(str(each.message).split("`")[1] for each in caught) == sorted(named)


def drawing(layer: Any, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=layer.generator)


def test_the_check_finds_what_depends_on_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(drawing, generator=torch.Generator())
    smp.checkpoint(layer, torch.randn(2, WIDTH)).sum().backward()  # without a word, as in torch
    monkeypatch.setenv("SMPKIT_CHECK", "1")
    loss = smp.checkpoint(layer, torch.randn(2, WIDTH)).sum()
    with pytest.raises(UsageError, match=r"the forward of `Layer` again.*tensor 1 that it saves was float32\[2, 4\]"):
        loss.backward()


# --- what is not copied -----------------------------------------------------------------------------------------------


def test_what_will_not_run_again_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    copy = buffers._copy

    def note(tensor: Tensor) -> Tensor:
        copied.append(tensor)
        return copy(tensor)

    monkeypatch.setattr(buffers, "_copy", note)
    layer, x = Layer(later, average=average()), torch.zeros(2, WIDTH)
    monkeypatch.setattr(state, "tracing", True)  # a trial of the step, on tensors without data
    smp.checkpoint(layer, x)
    monkeypatch.setattr(state, "tracing", False)
    smp.checkpoint(layer.requires_grad_(False), x)  # a frozen stem
    assert copied == []
    layer.requires_grad_()
    for _ in range(3):
        smp.checkpoint(layer, x).sum().backward()
    assert len(copied) == 1  # of what nobody writes to, once
