"""Gradients, statistics and generators are those of a plain call.

The traps that others fell into carry the numbers of our list of them.
What torch's own checkpoint gets wrong (statistics counted twice, state that has moved on by the time of backward) is
compared with the plain call too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import smpkit.torch as smp

WIDTH = 6

Call = Callable[..., Any]


def plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def inputs() -> Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def train(module: nn.Module, call: Call, forward: Callable[[Call, nn.Module, Tensor], Tensor]) -> dict[str, Any]:
    """Train a copy for two steps; return everything that can be compared."""
    module = copy.deepcopy(module)
    torch.manual_seed(11)
    found: dict[str, Any] = {}
    for step in range(2):
        module.zero_grad()
        x = inputs()
        loss = forward(call, module, x).double().square().mean()
        loss.backward()
        gradients = {name: each.grad for name, each in module.named_parameters()}
        found[f"step {step}"] = {"loss": loss.detach(), "x": x.grad, **gradients}
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    return {**found, "buffers": dict(module.named_buffers()), "generator": torch.get_rng_state()}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, Tensor) else left is right


def once(call: Call, module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = call(module, x)
    return result


def check(module: nn.Module, forward: Callable[[Call, nn.Module, Tensor], Tensor] = once) -> None:
    """Compare with a plain call, bit for bit."""
    module = module.double()
    assert same(train(module, smp.checkpoint, forward), train(module, plainly, forward))


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner or nn.Tanh()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.inner(self.first(x)))
        return result


# --- 15: random numbers ---------------------------------------------------------------------------------------------


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(5)

    def __deepcopy__(self, memo: Any) -> OwnGenerator:
        made = OwnGenerator().double()
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) > 0.4
        result: Tensor = self.linear(x).tanh() * keep
        return result


def twice(call: Call, module: nn.Module, x: Tensor) -> Tensor:
    return once(call, module, x) + once(call, module, 2 * x)


@pytest.mark.parametrize("module", [Block(nn.Dropout(0.4)), OwnGenerator()], ids=["default generator", "its own"])
@pytest.mark.parametrize("forward", [once, twice])
def test_trap_15_random_numbers_are_drawn_again(module: nn.Module, forward: Any) -> None:
    check(module, forward)


def test_trap_15_without_preservation_numbers_are_new() -> None:
    block = Block(nn.Dropout(0.5)).double()
    torch.manual_seed(0)
    x = inputs()
    smp.checkpoint(block, x, preserve_rng_state=False).sum().backward()
    assert x.grad is not None
    torch.manual_seed(0)
    y = inputs()
    block(y).sum().backward()
    assert y.grad is not None
    assert not torch.equal(x.grad, y.grad)


# --- 16: autocast -----------------------------------------------------------------------------------------------------


class InAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, call: Call, x: Tensor, cache: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            made: Tensor = call(self.block, x)
        assert made.dtype is torch.bfloat16
        return made


@pytest.mark.parametrize("cache", [False, True])
def test_trap_16_recomputation_runs_under_the_autocast_of_the_call(cache: bool) -> None:
    module = InAutocast()

    def forward(call: Call, model: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = model(call, x.float(), cache)
        return result

    assert same(train(module, smp.checkpoint, forward), train(module, plainly, forward))


# --- 17: what forward changes -----------------------------------------------------------------------------------------


class Average(nn.Module):
    """Centres by a mean of its own over all calls so far, which it keeps by replacing the buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0) * self.calls
        result: Tensor = (self.linear(x) - self.mean).tanh() * self.calls
        return result


CHANGING = {
    "BatchNorm": lambda: Block(nn.BatchNorm1d(WIDTH)),
    "BatchNorm, cumulative": lambda: Block(nn.BatchNorm1d(WIDTH, momentum=None)),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(0, (1, 5)), nn.InstanceNorm1d(5, track_running_stats=True), nn.Linear(WIDTH, WIDTH)
    ),
    "spectral norm": lambda: Block(spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "an average of its own": lambda: Block(Average()),
}


@pytest.mark.parametrize("build", CHANGING.values(), ids=CHANGING)
@pytest.mark.parametrize("forward", [once, twice])
def test_trap_17_what_forward_changes_is_changed_once(build: Callable[[], nn.Module], forward: Any) -> None:
    torch.manual_seed(1)
    check(build(), forward)


def test_trap_17_a_count_in_the_module_counts_calls() -> None:
    average = Average()
    for _ in range(3):
        smp.checkpoint(average, torch.randn(2, WIDTH)).sum().backward()
    assert average.calls == 3


def test_a_switch_to_eval_before_backward_does_not_reach_recomputation() -> None:
    results = []
    for call in (plainly, smp.checkpoint):
        torch.manual_seed(2)
        block, x = Block(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))).double(), inputs()
        made = call(block, x)
        block.eval()
        made.sum().backward()
        assert not any(each.training for each in block.modules())
        results.append((x.grad, dict(block.named_buffers())))
    assert same(dict(enumerate(results[0])), dict(enumerate(results[1])))


# --- 18: tensor subclasses --------------------------------------------------------------------------------------------


class Marked(Tensor):
    """A subclass that every operation hands on."""


def test_trap_18_subclasses_come_back_as_what_they_are() -> None:
    kinds = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            kinds.append(type(x))
            result: Tensor = self.linear(x).sin()
            return result

    x = torch.randn(2, WIDTH).as_subclass(Marked).requires_grad_()
    smp.checkpoint(Looks(), x).sum().backward()
    assert kinds == [Marked, Marked]
    assert type(x.grad) in {Tensor, Marked}


# --- 19: torch.compile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["the layer", "in place", "all of it"])
def test_trap_19_compiled_modules(how: str) -> None:
    torch._dynamo.reset()
    plain, x = nn.Sequential(Block(), Block()).double(), inputs()
    plain(x).sum().backward()
    model = copy.deepcopy(plain)
    model.zero_grad()
    called: Any = model
    if how == "the layer":
        model[0] = torch.compile(model.get_submodule("0"), backend="aot_eager")  # type: ignore[assignment]
        smp.set_activation_checkpointing(model)
    elif how == "in place":
        model[0].compile(backend="aot_eager")
        smp.set_activation_checkpointing(model)
    else:
        smp.set_activation_checkpointing(model)
        called = torch.compile(model, backend="aot_eager")
    y = inputs()
    called(y).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


# --- 21, 22: gradients ------------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """An integer input, a frozen weight, and a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        made = self.linear(self.embedding(indices)).sin() * x
        return made, made.argmax(-1)


def test_trap_21_frozen_and_unused_parameters_and_integers() -> None:
    def forward(call: Call, module: nn.Module, x: Tensor) -> Tensor:
        made, best = call(module, x, torch.arange(5) % WIDTH)
        assert best.dtype is torch.int64
        result: Tensor = made
        return result

    check(Partly(), forward)


def test_trap_21_a_frozen_stem_keeps_nothing() -> None:
    stem = Block().requires_grad_(False)

    def refuse(_: Tensor) -> None:
        raise AssertionError("kept")

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda tensor: tensor):
        smp.checkpoint(stem, torch.randn(2, WIDTH))


def test_trap_21_a_trained_layer_on_inputs_without_gradient() -> None:
    check(Block(), lambda call, module, x: once(call, module, x.detach()) + x.sum())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.last = self.first.first


def test_trap_22_tied_parameters_and_a_module_used_twice() -> None:
    def forward(call: Call, module: nn.Module, x: Tensor) -> Tensor:
        for name in ("first", "second", "first"):
            x = x + once(call, module.get_submodule(name), x)
        return x

    check(Tied(), forward)


# --- 23: arguments of every kind, and none ----------------------------------------------------------------------------


class Anything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mask: Tensor | None = None

    def forward(self, state: dict[str, Any], *, extra: tuple[Any, ...], scale: float, name: str) -> dict[str, Any]:
        assert (name, extra[1]) == ("a name", None)
        x = self.linear(state["x"]).tanh() * extra[0][0] * scale
        if self.mask is not None:
            x = x * self.mask
        return {"x": x, "more": [state["more"], x.detach()], "name": name}


def test_trap_23_nested_keyword_and_other_arguments() -> None:
    def forward(call: Call, module: nn.Module, x: Tensor) -> Tensor:
        made = call(module, {"x": x, "more": 3}, extra=([2 * x, 1], None), scale=0.5, name="a name")
        assert made["more"][0] == 3
        assert made["name"] == "a name"
        result: Tensor = made["x"]
        return result

    check(Anything(), forward)


def test_trap_23_a_tensor_that_the_caller_put_on_the_module() -> None:
    # Set anew for each microbatch: by the time of backward the module has the next one's.
    def forward(call: Call, module: nn.Module, x: Tensor) -> Tensor:
        made = []
        for factor in (1.0, 3.0):
            module.mask = x * factor
            made.append(call(module, {"x": x, "more": 0}, extra=([x], None), scale=factor, name="a name")["x"])
        return made[0] + made[1]

    check(Anything(), forward)


class Cache:
    """A cache of keys as Hugging Face's layers fill it."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else len(self.keys)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        keys: Tensor = self.linear(x)
        if cache is not None:
            keys = cache.keys = keys if cache.keys is None else torch.cat([cache.keys, keys])
        return x.tanh() @ keys.T @ keys


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.filterwarnings("ignore:.*is handed a cache that is filled")
def test_trap_23_a_cache_is_filled_once(filled: bool) -> None:
    def forward(call: Call, module: nn.Module, x: Tensor) -> Tensor:
        cache = Cache()
        cache.keys = x.sin() if filled else None
        result: Tensor = call(module, x, cache=cache)
        return result

    check(Caching(), forward)


def test_trap_23_a_filled_cache_is_not_recomputed_and_that_is_said() -> None:
    cache = Cache()
    cache.keys = torch.ones(1, WIDTH)
    with pytest.warns(UserWarning, match="`Caching` is not checkpointed: it is handed a cache that is filled"):
        smp.checkpoint(Caching(), torch.ones(1, WIDTH), cache)


def test_trap_23_evaluation_fills_a_cache() -> None:
    cache = Cache()
    with torch.no_grad():
        smp.checkpoint(Caching(), torch.ones(1, WIDTH), cache)
    assert cache.get_seq_length() == 1


def test_trap_23_no_tensor_at_all() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, power: int) -> Tensor:
            return self.weight**power

    check(Constant(), lambda call, module, x: once(lambda m, _: call(m, 3), module, x) + x)


def test_a_module_that_hands_its_input_on_or_changes_it_in_place() -> None:
    check(Block(nn.ReLU(inplace=True)))

    class Through(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    check(Through())


# --- 12, 13, 14: other ways through backward --------------------------------------------------------------------------


def test_trap_12_the_graph_can_be_walked_again() -> None:
    block = Block(nn.Dropout(0.3)).double()
    torch.manual_seed(4)
    x = inputs()
    loss = smp.checkpoint(block, x).square().sum()
    first = torch.autograd.grad(loss, [x, *block.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *block.parameters()])
    torch.manual_seed(4)
    y = inputs()
    plain = torch.autograd.grad(block(y).square().sum(), [y, *block.parameters()])
    assert all(map(torch.equal, first, plain))
    assert all(map(torch.equal, second, plain))


def test_trap_12_double_backward() -> None:
    block = Block().double()
    found = []
    for call in (smp.checkpoint, plainly):
        x = inputs()
        (slope,) = torch.autograd.grad(call(block, x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, *block.parameters()]))
    assert all(map(torch.equal, *found))


class Fails(nn.Module):
    """Raises in its n-th forward."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.left = iter(range(when - 1, -1, -1))  # an object: simple attributes and lists are restored

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sin()
        if next(self.left, None) == 0:
            raise ValueError("no more")
        result: Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("when", [1, 2], ids=["in forward", "in backward"])
def test_trap_13_an_exception_leaves_nothing_behind(when: int) -> None:
    module = Fails(when)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="no more"):
        smp.checkpoint(module, torch.randn(2, WIDTH, generator=torch.Generator())).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    module.zero_grad()
    check(module)


def test_trap_14_a_forward_without_backward_keeps_nothing() -> None:
    block = Block()
    with torch.no_grad():
        assert torch.equal(smp.checkpoint(block, torch.ones(2, WIDTH)), block(torch.ones(2, WIDTH)))
    with torch.inference_mode():
        assert torch.equal(smp.checkpoint(block, torch.ones(2, WIDTH)), block(torch.ones(2, WIDTH)))


# --- checkpoints in checkpoints ---------------------------------------------------------------------------------------


class Outer(nn.Module):
    def __init__(self, inner: Call) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(nn.Dropout(0.3)), Block(nn.BatchNorm1d(WIDTH))])
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.inner(block, x)
        return functional.dropout(x, 0.2)


def by_torch(reentrant: bool) -> Call:
    def call(module: nn.Module, x: Tensor) -> Any:
        return torch_checkpoint(module, x, use_reentrant=reentrant)

    return call


@pytest.mark.parametrize("inner", ["ours", "torch's", "torch's, reentrant"])
def test_nested_checkpoints(inner: str) -> None:
    calls: dict[str, Call] = {"ours": smp.checkpoint, "torch's": by_torch(False), "torch's, reentrant": by_torch(True)}
    torch.manual_seed(1)
    plain, ours = Outer(plainly).double(), Outer(calls[inner]).double()
    ours.load_state_dict(plain.state_dict())
    expected = train(plain, plainly, once)
    if inner != "ours":
        # Torch's own recomputes after ours is done, and counts the batch a second time: only gradients are equal.
        assert same(train(ours, smp.checkpoint, once)["step 0"], expected["step 0"])
    else:
        assert same(train(ours, smp.checkpoint, once), expected)
        assert same(train(ours, plainly, once), expected)
