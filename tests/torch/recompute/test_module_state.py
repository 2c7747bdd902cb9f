"""What recomputation restores on modules, and what it refuses because it cannot be had back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.errors import UsageError
from smpkit.torch.core import module_state
from smpkit.torch.core.module_state import ModuleState

WIDTH = 4


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor | None]:
    module.zero_grad()
    loss.backward()
    return [each.grad for each in module.parameters()]


def assert_as_plain(make: Callable[[], nn.Module], between: Callable[[Any], object] = lambda module: None) -> None:
    """Compare two steps of two forwards each, with `between` after the forwards."""
    found = []
    for call in (lambda module, x: module(x), smp.checkpoint):
        torch.manual_seed(0)
        module = make().double()
        for _ in range(2):
            x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
            loss = call(module, x).square().sum() + call(module, 2 * x).square().sum()
            before = module.training
            between(module)
            found.append([*gradients(module, loss), x.grad, *(each.clone() for each in module.buffers())])
            module.train(before)
    half = len(found) // 2
    for plain, ours in zip(found[:half], found[half:], strict=True):
        assert all(
            one is other or torch.equal(one, other)  # type: ignore[arg-type]
            for one, other in zip(plain, ours, strict=True)
        )


class Toggling(nn.Module):
    """A buffer that is None at first, and after every other call."""

    kept: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        kept, self.kept = self.kept, (x.detach().mean(0) if self.kept is None else None)
        return x.tanh() if kept is None else (x + kept).tanh()


def test_a_buffer_that_is_none_at_first() -> None:
    assert_as_plain(Toggling)


def test_dropout_that_changes_between_forward_and_backward() -> None:
    def change(module: Any) -> None:
        module[1].p = 0.9 if module[1].p == 0.2 else 0.2

    assert_as_plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)), change)


class Averaging(nn.Module):
    """An average that it writes through `.data`, as many vector quantizers do: its version stays."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            self.average.data.mul_(0.9).add_(x.detach().mean(0))
        return (x - self.average).tanh()


def test_writes_without_a_new_version_are_found_in_the_first_call_that_trains() -> None:
    assert_as_plain(Averaging)
    module = Averaging().eval()
    smp.checkpoint(module, torch.randn(2, WIDTH)).sum().backward()
    module.train()
    x = torch.randn(2, WIDTH)
    (smp.checkpoint(module, x) + smp.checkpoint(module, x)).square().sum().backward()
    assert module.linear.weight.grad is not None


class Layer(nn.Module):
    """Made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.is_made = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_made:
            self.linear, self.is_made = nn.Linear(WIDTH, WIDTH, dtype=x.dtype), True
        return self.linear(x).tanh()


@pytest.mark.parametrize("make", [Layer, lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())])
def test_a_first_call_that_makes_weights(make: Callable[[], nn.Module]) -> None:
    assert_as_plain(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH)))


def test_weights_that_were_replaced_for_a_call() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    x, found = torch.randn(3, WIDTH, dtype=torch.float64), []

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Any:
            return smp.checkpoint(self.inner, x)

    for called, prefix in ((module, ""), (Checkpointed(), "inner.")):
        others = {prefix + name: (2 * each).detach().requires_grad_() for name, each in module.named_parameters()}
        torch.func.functional_call(called, others, (x,)).square().sum().backward()
        found.append([each.grad for each in others.values()])
    assert all(map(torch.equal, *found))


def test_weights_that_change_between_forward_and_backward_are_named() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    loss = smp.checkpoint(module, torch.randn(2, WIDTH, requires_grad=True)).sum()
    with torch.no_grad():
        module.get_parameter("1.weight").mul_(2)
    with pytest.raises(UsageError, match="`weight` of a Linear was changed in place between a forward"):
        loss.backward()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_an_embedding_that_scales_its_rows_in_forward(max_norm: float | None) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(6, WIDTH, max_norm=max_norm), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.linear(self.table(x.detach().abs().long().sum(1) % 6)).tanh()
            return made * x

    assert_as_plain(Looking)


def test_a_large_buffer_that_is_written_to_for_the_first_time() -> None:
    class Seldom(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(1 << 15))

        def forward(self, x: Tensor) -> Tensor:
            if float(x[0].detach()) > 1:
                self.table.add_(1)
            return x.tanh() * self.table[:2]

    module = Seldom()
    for _ in range(3):
        smp.checkpoint(module, torch.zeros(2, requires_grad=True)).sum().backward()
    for wanted in (UsageError, None):
        x = torch.full((2,), 2.0, requires_grad=True)
        loss = smp.checkpoint(module, x).sum()
        if wanted is not None:
            with pytest.raises(wanted, match="`table` of a Seldom was changed in place in a forward"):
                loss.backward()
        else:
            loss.backward()
            assert torch.allclose(x.grad, module.table[:2] * (1 - x.tanh().square()))  # type: ignore[arg-type]


def test_nothing_that_forward_leaves_alone_is_copied_twice() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    module.register_buffer("mask", torch.ones(1 << 15))
    module.register_buffer("small", torch.ones(3))
    contents = []
    for _ in range(5):
        state = ModuleState([module])
        module(torch.randn(3, WIDTH))
        cells = dict(state._saved[0].buffers or {})
        state.end_forward()
        contents.append({name: cell and cell.content for name, cell in cells.items()})
    assert contents[3]["mask"] is contents[4]["mask"] is None
    assert contents[3]["small"] is contents[4]["small"] is not None


def test_shared_containers_stay_shared() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    values: dict[str, Any] = {"list": [1, torch.ones(2)], "set": {1, 2}}
    module.one, module.other = values, (values["list"],)  # type: ignore[assignment]
    state = ModuleState([module])
    state.end_forward()
    values["list"].append(2)
    values["set"].add(3)
    with state.restored():
        one: Any = module.one
        other: Any = module.other
        assert id(one) != id(values)
        assert len(one["list"]) == 2
        assert one["set"] == {1, 2}
        assert other[0] is one["list"]
    assert id(module.one) == id(values)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def test_layers_that_were_replaced_since_the_forward() -> None:
    def replace(module: nn.Sequential) -> None:
        module[0], module[2] = module[2], linear()

    assert_as_plain(lambda: nn.Sequential(linear(), nn.Tanh(), linear()), replace)


class Rotating(nn.Module):
    """Uses its layers in another order in each forward."""

    def __init__(self, *, swaps_first: bool) -> None:
        super().__init__()
        self.swaps_first = swaps_first
        self.one, self.other = linear(), nn.Sequential(linear(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.swaps_first:
            self.one, self.other = self.other, self.one  # type: ignore[assignment]
        x = self.other(self.one(x)).tanh()
        if not self.swaps_first:
            self.one, self.other = self.other, self.one  # type: ignore[assignment]
        return x


@pytest.mark.parametrize("swaps_first", [False, True])
def test_layers_that_a_forward_puts_in_other_places(swaps_first: bool) -> None:
    assert_as_plain(lambda: nn.Sequential(linear(), Rotating(swaps_first=swaps_first), linear()))


class Renewing(nn.Module):
    """Makes a new part in each forward."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make, self.part = make, make()

    def forward(self, x: Tensor) -> Tensor:
        self.part = self.make()
        return x @ self.part if isinstance(self.part, nn.Parameter) else self.part(x)


@pytest.mark.parametrize("make", [linear, lambda: nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float64))])
def test_parts_that_each_forward_makes_anew_are_named(make: Callable[[], Any]) -> None:
    """The recomputation would make others, and their gradients would never reach those that the script knows."""
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = smp.checkpoint(Renewing(make), x).sum()
    with pytest.raises(UsageError, match="the forward of a Renewing makes a new `part` in each call"):
        loss.backward()


class Steady(nn.Module):
    """Does the same in each call, until `behaves` is set."""

    behaves: Callable[[Any], object] = staticmethod(lambda module: None)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tied = linear(), linear()
        self.tied.bias = None  # type: ignore[assignment]
        self.inner = nn.Sequential(nn.Dropout(0.2), linear(), nn.Tanh())
        self.scale, self.num_calls = 2.0, 0

    def forward(self, x: Tensor) -> Tensor:
        Steady.behaves(self)
        x = self.inner(self.linear(x)) * self.scale + getattr(self, "shift", 0.0)
        return x.square() + self.tied(x)


def change_dropout(module: Any) -> None:
    module.inner[0].p = 0.9


def replace_layer(module: Steady) -> None:
    module.inner[1] = linear()


def replace_weight(module: Steady) -> None:
    module.linear.weight = nn.Parameter(torch.zeros_like(module.linear.weight))


def swap_layers(module: Any) -> None:
    module.linear, module.inner[1] = module.inner[1], module.linear


def add_attribute(module: Any) -> None:
    module.shift = 1.0


def add_buffer(module: Steady) -> None:
    module.register_buffer("shift", torch.ones(1))


def count_call(module: Steady) -> None:
    module.num_calls += 1
    module.scale *= 1.5


def note_call(module: Steady) -> None:
    module.num_calls += 1


def note_calls_from_now_on(module: Steady) -> None:
    del module
    Steady.behaves = staticmethod(note_call)


@torch.no_grad()
def write(module: Steady) -> None:
    module.linear.weight.mul_(2)


def write_silently(module: Steady) -> None:
    module.linear.weight.data.mul_(2)


def become_steady(module: Steady, call: Any) -> Tensor:
    """Run calls that change nothing, until they are compared at once; return their last input."""
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    for _ in range(6):
        call(module, x).sum().backward()
    assert (module in module_state._layouts) == (call is smp.checkpoint)
    module.zero_grad()
    x.grad = None
    return x


@pytest.mark.parametrize(
    ("behaves", "between"),
    [
        *[(behaves, each) for behaves in (None, count_call, swap_layers) for each in (change_dropout, replace_weight)],
        *[(None, each) for each in (replace_layer, nn.Module.eval, count_call, add_attribute, add_buffer)],
        (None, note_calls_from_now_on),
    ],
)
def test_modules_that_were_the_same_in_many_calls_and_change_then(
    behaves: Callable[[Any], object] | None, between: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for call in (lambda module, x: module(x), smp.checkpoint):
        torch.manual_seed(0)
        monkeypatch.setattr(Steady, "behaves", staticmethod(lambda module: None))
        module = Steady()
        x, weights = become_steady(module, call), dict(module.named_parameters())
        if behaves is not None:
            Steady.behaves = staticmethod(behaves)
        loss = call(module, x).sum()
        between(module)
        after = vars(module).copy(), module.inner[0].p
        loss.backward()
        assert (vars(module), module.inner[0].p) == after
        found.append([x.grad, *(each.grad for each in weights.values())])
    for plain, ours in zip(*found, strict=True):
        assert plain is ours or torch.equal(plain, ours)


def test_weights_that_were_the_same_in_many_calls_and_are_written_to_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steady, "behaves", Steady.behaves)
    module = Steady()
    output = smp.checkpoint(module, become_steady(module, smp.checkpoint))
    write(module)
    with pytest.raises(UsageError, match="`weight` of a Linear was changed in place between a forward and its"):
        output.sum().backward()
    Steady.behaves = staticmethod(replace_layer)
    with pytest.raises(UsageError, match="makes a new `1` in each call"):
        smp.checkpoint(module, become_steady(Steady(), smp.checkpoint)).sum().backward()


def test_writes_of_modules_that_were_the_same_in_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for call in (lambda module, x: module(x), smp.checkpoint):
        torch.manual_seed(0)
        monkeypatch.setattr(Steady, "behaves", staticmethod(lambda module: None))
        module = Steady()
        x = become_steady(module, call)
        Steady.behaves = staticmethod(write)
        if call is smp.checkpoint:
            with pytest.raises(UsageError, match="`weight` of a Linear was changed in place in a forward"):
                call(module, x).sum().backward()
            module.zero_grad()
            x.grad = None
        else:
            module(x)
        call(module, x).sum().backward()  # this one knows
        found.append([x.grad, *gradients(module, call(module, x).sum())])
    for plain, ours in zip(*found, strict=True):
        assert plain is ours or torch.equal(plain, ours)


def test_writes_without_a_new_version_while_modules_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steady, "behaves", Steady.behaves)
    module = Steady()
    x = become_steady(module, smp.checkpoint)
    module.eval()
    Steady.behaves = staticmethod(write_silently)
    smp.checkpoint(module, x)
    module.train()
    assert module not in module_state._layouts  # a call that trains copies the weights
