"""Gradients, statistics and random numbers of recomputed layers are those of a plain call, to the bit.

What forwards do to buffers is in `test_buffers.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import smpkit.torch as smp
from tests.models import WIDTH, Case, mse_step, singles, vectors
from tests.train import Way, check_same, train_plainly

Call = Callable[..., Any]


def plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


class Model(nn.Module):
    """Calls a layer twice before backward, between other layers."""

    call: Call = staticmethod(plainly)

    def __init__(self, layer: nn.Module, how: Callable[[Call, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.last(
            (self.how(self.call, self.layer, x) + self.how(self.call, self.layer, 2 * x)).to(x.dtype)
        )
        return result


def once(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = call(layer, x)
    return made


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner or nn.Tanh()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.inner(self.first(x)))
        return result


class Partly(nn.Module):
    """An integer input, a frozen weight, and a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        made = self.linear(self.embedding(indices)).sin() * x
        return made, made.argmax(-1)


def with_integers(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    made, best = call(layer, x, torch.arange(len(x)) % WIDTH)
    assert best.dtype is torch.int64
    result: Tensor = made
    return result


class Anything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any], *, extra: tuple[Any, ...], scale: float, name: str) -> dict[str, Any]:
        assert (name, extra[1]) == ("a name", None)
        x = self.linear(state["x"]).tanh() * extra[0][0] * scale
        return {"x": x, "more": [state["more"], x.detach()], "name": name}


def with_anything(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    made = call(layer, {"x": x, "more": 3}, extra=([2 * x, 1], None), scale=0.5, name="a name")
    assert (made["more"][0], made["name"]) == (3, "a name")
    result: Tensor = made["x"]
    return result


class Constant(nn.Module):
    """Takes no tensor at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, power: int) -> Tensor:
        return self.weight**power


def with_a_number(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = call(layer, 3) + x
    return made


class Cache:
    """A cache of keys as Hugging Face's layers fill it."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys = keys

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else len(self.keys)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        keys: Tensor = self.linear(x)
        if cache is not None:
            keys = cache.keys = keys if cache.keys is None else torch.cat([cache.keys, keys])
        return x.tanh() @ keys.T @ keys


def fills_a_cache(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = call(layer, x, cache=Cache())
    return made


def adds_to_a_cache(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = call(layer, x, cache=Cache(x.sin()))
    return made


def in_autocast(call: Call, layer: nn.Module, x: Tensor, *, is_cached: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
        made: Tensor = call(layer, x)
    assert made.dtype is torch.bfloat16
    return made


def on_data(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = call(layer, x.detach()) + x
    return made


class Outer(nn.Module):
    """Checkpoints in a layer that may be checkpointed itself."""

    def __init__(self, inner: Call) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(nn.Dropout(0.3)), Block(nn.BatchNorm1d(WIDTH))])
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.inner(block, x)
        return functional.dropout(x, 0.2)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "dropout": (lambda: Block(nn.Dropout(0.4)), once),
    "BatchNorm": (lambda: Block(nn.BatchNorm1d(WIDTH)), once),
    "frozen and unused parameters, integers": (Partly, with_integers),
    "inputs without gradient": (Block, on_data),
    "arguments of every kind": (Anything, with_anything),
    "no tensor": (Constant, with_a_number),
    "an empty cache": (Caching, fills_a_cache),
    "a filled cache": (Caching, adds_to_a_cache),
    "in place": (lambda: Block(nn.ReLU(inplace=True)), once),
    "an input that is handed on": (nn.Identity, once),
    "checkpoints in it": (lambda: Outer(smp.checkpoint), once),
}


def recompute(model: Any) -> None:
    model.call = smp.checkpoint


def check(case: Case) -> None:
    [plain] = train_plainly(case, Way(microbatches=1, batches=(5, 5)))
    [ours] = train_plainly(case, Way(microbatches=1, batches=(5, 5), prepare=recompute))
    check_same(ours, plain, 0)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore:.*is handed a cache that is filled")
def test_recomputed_layers_train_as_plain_ones(name: str) -> None:
    make, how = LAYERS[name]
    check(Case(lambda: Model(make(), how), vectors, mse_step))


@pytest.mark.parametrize("is_cached", [False, True])
def test_recomputation_runs_under_the_autocast_of_the_call(is_cached: bool) -> None:
    how = partial(in_autocast, is_cached=is_cached)
    check(Case(lambda: Model(Block(), how), singles, mse_step, torch.float32))


# --- torch's checkpoint and compiler ----------------------------------------------------------------------------------


def gradients(module: nn.Module, call: Call = plainly) -> list[Tensor | None]:
    torch.manual_seed(4)
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    call(module, x).square().sum().backward()
    return [x.grad, *(each.grad for each in module.parameters())]


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_in_ours(reentrant: bool) -> None:
    def theirs(module: Any, x: Tensor) -> Any:
        return torch_checkpoint(module, x, use_reentrant=reentrant)

    plain, ours = Outer(plainly).double(), Outer(theirs).double()
    ours.load_state_dict(plain.state_dict())
    assert all(map(torch.equal, gradients(ours, smp.checkpoint), gradients(plain)))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["the layer", "all of it"])
def test_compiled_modules(how: str) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(Block(), Block()).double()
    model = copy.deepcopy(plain)
    if how == "the layer":
        model[0].compile(backend="aot_eager")
    smp.set_activation_checkpointing(model)
    called: Any = model if how == "the layer" else torch.compile(model, backend="aot_eager")
    for ours, theirs in zip(gradients(called), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# --- other ways through backward --------------------------------------------------------------------------------------


def test_without_preservation_random_numbers_are_new() -> None:
    block = Block(nn.Dropout(0.5)).double()
    [ours, *_] = gradients(block, lambda module, x: smp.checkpoint(module, x, preserve_rng_state=False))
    [plain, *_] = gradients(block)
    assert not torch.equal(ours, plain)  # type: ignore[arg-type]


def test_the_graph_can_be_walked_again() -> None:
    block = Block(nn.Dropout(0.3)).double()
    plain = gradients(block)
    torch.manual_seed(4)
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = smp.checkpoint(block, x).square().sum()
    for retain in (True, False):
        found = torch.autograd.grad(loss, [x, *block.parameters()], retain_graph=retain)
        assert all(map(torch.equal, found, plain))  # type: ignore[arg-type]


def test_double_backward() -> None:
    block = Block().double()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for call in (smp.checkpoint, plainly):
        (slope,) = torch.autograd.grad(call(block, x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, *block.parameters()]))
    assert all(map(torch.equal, *found))


class Fails(nn.Module):
    """Raises in its n-th forward."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.left = iter(range(when - 1, -1, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sin()
        if next(self.left, None) == 0:
            raise ValueError("no more")
        result: Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("when", [1, 2], ids=["in forward", "in backward"])
def test_an_exception_leaves_nothing_behind(when: int) -> None:
    module = Fails(when).double()
    state = torch.get_rng_state()
    x = torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator())
    with pytest.raises(ValueError, match="no more"):
        smp.checkpoint(module, x).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    module.zero_grad()
    ours = gradients(module, smp.checkpoint)
    module.zero_grad()
    assert all(map(torch.equal, ours, gradients(module)))  # type: ignore[arg-type]


# --- what is kept, and what modules see -------------------------------------------------------------------------------


def test_a_frozen_stem_keeps_nothing() -> None:
    def refuse(_: Tensor) -> None:
        raise AssertionError("kept")

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda tensor: tensor):
        smp.checkpoint(Block().requires_grad_(False), torch.randn(2, WIDTH))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_backward_is_a_plain_one(mode: Any) -> None:
    block, cache = Block(), Cache()
    with mode():
        assert torch.equal(smp.checkpoint(block, torch.ones(2, WIDTH)), block(torch.ones(2, WIDTH)))
        smp.checkpoint(Caching(), torch.ones(1, WIDTH), cache)
    assert cache.get_seq_length() == 1


def test_a_filled_cache_is_not_recomputed_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="`Caching` is not checkpointed: it is handed a cache that is filled"):
        smp.checkpoint(Caching(), torch.ones(1, WIDTH), Cache(torch.ones(1, WIDTH)))


class Marked(Tensor):
    """A subclass that every operation hands on."""


class Looks(nn.Module):
    def __init__(self, kinds: list[type]) -> None:
        super().__init__()
        self.note = kinds.append

    def forward(self, x: Tensor) -> Tensor:
        self.note(type(x))
        return x.sin()


def test_subclasses_come_back_as_what_they_are() -> None:
    kinds: list[type] = []
    smp.checkpoint(Looks(kinds), torch.randn(2, WIDTH).as_subclass(Marked).requires_grad_()).sum().backward()
    assert kinds == [Marked, Marked]
