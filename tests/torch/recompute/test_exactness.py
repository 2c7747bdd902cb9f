"""What a recomputed layer computes, draws and leaves in its buffers is what a plain call does, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import smpkit.torch as smp
from tests.torch.recompute.layers import WIDTH, Call, Layer, batch, gradients, plainly, same


def once(call: Call, layer: nn.Module, x: Tensor) -> Any:
    return call(layer, x)


def average() -> Tensor:
    return torch.ones(WIDTH)


# --- forwards that write to buffers -----------------------------------------------------------------------------------


def in_place(layer: Any, x: Tensor) -> Tensor:
    layer.average.mul_(0.9).add_(x.detach().mean(0))
    return (layer.linear(x) - layer.average).tanh()


def replaced(layer: Any, x: Tensor) -> Tensor:
    layer.average = 0.9 * layer.average + x.detach().mean(0)
    return (layer.linear(x) - layer.average).tanh()


def now_and_then(layer: Any, x: Tensor) -> Tensor:
    """Keep something in each other call: a buffer that is None comes and goes."""
    layer.kept, kept = (x.detach().mean(0) if layer.kept is None else None), layer.kept
    return layer.linear(x if kept is None else x * kept.exp()).tanh()


def rotated(layer: Any, x: Tensor) -> Tensor:
    """Build a table anew for a longer sequence, as GPT-NeoX's rotary embedding does."""
    if len(x) > layer.length:
        layer.length, layer.average = len(x), torch.arange(len(x) * WIDTH, dtype=x.dtype).view(-1, WIDTH)
    return (layer.linear(x) * layer.average[: len(x)].cos()).tanh()


class Instances(nn.InstanceNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.T[None])[0].T


class Renormed(nn.BatchNorm1d):
    """Reads in training what torch's norms only write."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.exp(self.running_var)  # type: ignore[arg-type]


def with_none() -> nn.Module:
    layer = Layer(now_and_then)
    layer.register_buffer("kept", None)
    return layer


# --- forwards that do other things ------------------------------------------------------------------------------------


def dropped(layer: Any, x: Tensor) -> Tensor:
    return functional.dropout(layer.linear(x).tanh(), 0.4)


def hooked(layer: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient / 2)
    return layer.linear(x).tanh()


def biased(x: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(x * bias)


def backward_inside(layer: Any, x: Tensor) -> Tensor:
    y = smp.checkpoint(layer.inner, x)
    (slope,) = torch.autograd.grad(dropped(layer, y).sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return in_place(layer, y * slope * again)


def catches(layer: Any, x: Tensor) -> Tensor:
    try:
        return dropped(layer, x)
    except Exception:
        return x


def cleans_up(layer: Any, x: Tensor) -> Tensor:
    try:
        return dropped(layer, x)
    except BaseException:
        dropped(layer, x)
        raise


class SavesForTwo(torch.autograd.Function):
    """Asks for what it has saved more than once in one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * (first + second)


def looked_up(layer: Any, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Take integers and a frozen weight, leave another weight alone, and return integers."""
    y = functional.linear(layer.table(indices), layer.linear.weight.detach()).sin() * x
    return y, y.argmax(-1)


def looks_up(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    y, best = call(layer, x, torch.arange(len(x)) % WIDTH)
    assert best.dtype is torch.int64
    return y


def anything(layer: Any, known: dict[str, Any], *, extra: tuple[Any, ...], scale: float, name: str) -> dict[str, Any]:
    assert (name, extra[1]) == ("a name", None)
    x = layer.linear(known["x"]).tanh() * extra[0][0] * scale
    return {"x": x, "more": [known["more"], x.detach()], "name": name}


def with_anything(call: Call, layer: nn.Module, x: Tensor) -> Tensor:
    result = call(layer, {"x": x, "more": 3}, extra=([2 * x, 1], None), scale=0.5, name="a name")
    assert (result["more"][0], result["name"]) == (3, "a name")
    return result["x"]


class Cache:
    """A cache of keys as Hugging Face's layers fill it."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys = keys

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else len(self.keys)


def caching(layer: Any, x: Tensor, cache: Cache | None) -> Tensor:
    keys: Tensor = layer.linear(x)
    if cache is not None:
        keys = cache.keys = keys if cache.keys is None else torch.cat([cache.keys, keys])
    return x.tanh() @ keys.T @ keys


# --- the table --------------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Call, Any, Tensor], Any]]] = {
    "BatchNorm": (lambda: nn.BatchNorm1d(WIDTH), once),
    "BatchNorm, cumulative": (lambda: nn.BatchNorm1d(WIDTH, momentum=None), once),
    "BatchNorm that is frozen": (lambda: nn.BatchNorm1d(WIDTH).eval(), once),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(WIDTH), once),
    "InstanceNorm": (lambda: Instances(WIDTH, track_running_stats=True), once),
    "a norm of the user's": (lambda: Renormed(WIDTH), once),
    "spectral norm": (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), once),
    "written in place": (lambda: Layer(in_place, average=average()), once),
    "replaced": (lambda: Layer(replaced, average=average()), once),
    "None, then a tensor": (with_none, once),
    "a table that is built anew": (lambda: Layer(rotated, average=torch.zeros(0, WIDTH), length=0), once),
    "dropout": (lambda: Layer(dropped), once),
    "a backward in the forward": (
        lambda: Layer(backward_inside, average=average(), inner=Layer(in_place, average=average())),
        once,
    ),
    "a hook on its input": (lambda: Layer(hooked), once),
    "catches exceptions": (lambda: Layer(catches), once),
    "cleans up after any": (lambda: Layer(cleans_up), once),
    "saves for two": (lambda: Layer(lambda layer, x: SavesForTwo.apply(layer.linear(x))), once),
    "in place": (lambda: Layer(lambda layer, x: layer.linear(x).relu_()), once),
    "an input that is handed on": (nn.Identity, once),
    "inputs without gradient": (lambda: Layer(dropped), lambda call, layer, x: call(layer, x.detach()) + x),
    "integers, frozen and unused weights": (lambda: Layer(looked_up, table=nn.Embedding(WIDTH, WIDTH)), looks_up),
    "arguments of every kind": (lambda: Layer(anything), with_anything),
    "no tensor": (
        lambda: Layer(lambda layer, power: layer.linear.weight**power),
        lambda call, layer, x: call(layer, 3).sum(0) + x,
    ),
    "an empty cache": (lambda: Layer(caching), lambda call, layer, x: call(layer, x, cache=Cache())),
    "a filled cache": (lambda: Layer(caching), lambda call, layer, x: call(layer, x, cache=Cache(x.sin()))),
}


def trained(name: str, call: Call, inner: Call) -> list[Any]:
    """Return gradients and buffers of steps that call a module twice, and walk the graph twice."""
    make, how = LAYERS[name]
    torch.manual_seed(0)
    module = Layer(lambda layer, x: how(inner, layer.inner, layer.linear(x)).sin(), inner=make()).double()
    values = list[Any]()
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
@pytest.mark.filterwarnings("ignore:.*is handed a cache that is filled")
def test_a_layer_trains_as_a_plain_one(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMPKIT_CHECK", "1" if "checked" in which else "0")
    inner, outer = (plainly if which == other else smp.checkpoint for other in ("outer", "inner"))
    assert same(trained(name, outer, inner), trained(name, plainly, plainly))


# --- other ways through forward and backward --------------------------------------------------------------------------


@pytest.mark.parametrize("is_cached", [False, True])
def test_recomputation_runs_under_the_autocast_of_the_call(is_cached: bool) -> None:
    def autocast(call: Call, module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            y = call(module, x.float()) + call(module, 2 * x.float())
        assert y.dtype is torch.bfloat16
        return y

    layer = Layer(lambda layer, x: layer.linear(layer.linear(x).sin()))
    assert same(gradients(layer, partial(autocast, smp.checkpoint)), gradients(layer, partial(autocast, plainly)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_in_ours(reentrant: bool) -> None:
    layer = Layer(lambda layer, x: torch_checkpoint(dropped, layer, x, use_reentrant=reentrant).sin()).double()
    plain = copy.deepcopy(layer)
    plain.act = lambda layer, x: dropped(layer, x).sin()
    assert same(gradients(layer, smp.checkpoint), gradients(plain))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at it while it traces
@pytest.mark.parametrize("all_of_it", [False, True])
def test_compiled_modules(all_of_it: bool) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))).double()
    model = copy.deepcopy(plain)
    if not all_of_it:
        model[0].compile(backend="aot_eager")
    smp.set_activation_checkpointing(model)
    compiled: Any = torch.compile(model, backend="aot_eager") if all_of_it else model
    for ours, theirs in zip(gradients(compiled), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_without_preservation_random_numbers_are_new() -> None:
    layer = Layer(dropped).double()
    [ours, *_] = gradients(layer, lambda module, x: smp.checkpoint(module, x, preserve_rng_state=False))
    [plain, *_] = gradients(layer)
    assert not torch.equal(ours, plain)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_recomputation_may_end_inside_torchscript() -> None:
    """It runs the bias and the dropout of Megatron's layers, their last operations."""
    scripted = torch.jit.script(biased)
    layer = Layer(lambda layer, x: scripted(layer.linear(x), layer.norm(x)), norm=nn.BatchNorm1d(WIDTH)).double()
    for _ in range(3):
        assert same(gradients(layer, smp.checkpoint), gradients(layer))


@pytest.mark.parametrize("checks", [False, True])
def test_what_kernels_leave_to_chance(checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """RReLU saves its noise before it draws it, an LSTM all of a workspace of which it fills a part."""
    monkeypatch.setenv("SMPKIT_CHECK", str(int(checks)))
    module = nn.LSTM(WIDTH, WIDTH, 2) if checks else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(0.1, 0.6))

    def trained(call: Call) -> list[Any]:
        torch.manual_seed(0)
        module.zero_grad()
        output = call(module, torch.randn(64, WIDTH))
        (output[0] if checks else output).square().sum().backward()
        return [each.grad for each in module.parameters()]

    assert same(trained(smp.checkpoint), trained(plainly))


def test_double_backward() -> None:
    layer, x, found = Layer(lambda layer, x: layer.linear(x).tanh()).double(), batch(), []
    for call in (smp.checkpoint, plainly):
        (slope,) = torch.autograd.grad(call(layer, x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, *layer.parameters()]))
    assert same(*found)  # type: ignore[arg-type]


@pytest.mark.parametrize("when", [1, 2], ids=["in forward", "in backward"])
def test_an_exception_leaves_nothing_behind(when: int) -> None:
    runs = list[int]()

    def fails(layer: Any, x: Tensor) -> Tensor:
        x = layer.linear(x).sin()
        runs.append(len(runs) + 1)
        if runs[-1] == when:
            raise ValueError("no more")
        return layer.linear(x)

    layer, state = Layer(fails).double(), torch.get_rng_state()
    with pytest.raises(ValueError, match="no more"):
        smp.checkpoint(layer, batch()).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert same(gradients(layer, smp.checkpoint), gradients(layer))


# --- what modules see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_backward_is_a_plain_one(mode: Any) -> None:
    layer, cache, x = Layer(caching), Cache(), torch.ones(2, WIDTH)
    with mode():
        assert torch.equal(smp.checkpoint(layer, x, cache), layer(x, None))
    assert cache.get_seq_length() == 2


def test_a_filled_cache_is_not_recomputed_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="`Layer` is not checkpointed: it is handed a cache that is filled"):
        smp.checkpoint(Layer(caching), torch.ones(1, WIDTH), Cache(torch.ones(1, WIDTH)))


class Marked(Tensor):
    """A subclass that every operation hands on."""


def test_second_runs_see_the_subclass_and_the_default_device_of_the_first() -> None:
    seen = list[Any]()

    def looks(_: Any, x: Tensor) -> Tensor:
        seen.append((type(x), torch.empty(1).device.type))
        return x.sin()

    x = torch.randn(2, WIDTH).as_subclass(Marked).requires_grad_()
    with torch.device("meta"):
        loss = smp.checkpoint(Layer(looks), x).sum()
    loss.backward()
    with torch.device("meta"):
        smp.checkpoint(Layer(looks), x).sum().backward()
    assert seen == [(Marked, "meta")] * 4


# --- attributes -------------------------------------------------------------------------------------------------------


def masked(layer: Any, x: Tensor) -> Tensor:
    return x * layer.mask


def counting(layer: Any, x: Tensor) -> Tensor:
    """Is a mistake that SMPKIT_CHECK=1 finds: what a forward sets itself may be for others."""
    layer.calls += 1
    return (x * layer.calls).tanh()


def reporting(layer: Any, x: Tensor) -> Tensor:
    """Set attributes for others to read, as a mixture of experts does with `l_aux`."""
    layer.calls, layer.mask, layer.l_aux, layer.sizes = len(x), None, x.square().mean(), [*x.shape]
    return x * layer.l_aux


@pytest.mark.parametrize(("act", "names"), [(masked, ["mask"]), (counting, []), (reporting, [])])
def test_an_attribute_that_changes_until_backward_is_named_once(act: Call, names: list[str]) -> None:
    layer = type(f"Is_{act.__name__}", (Layer,), {})(act, calls=0, mask=None, l_aux=None)  # warned of by class
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            losses = []
            for length in (2, 3, 3):
                if act is masked:
                    layer.mask = torch.randn(WIDTH)
                losses.append(smp.checkpoint(layer, batch(length)).sum())
            torch.stack(losses).sum().backward()
    assert [str(each.message).split("`")[1] for each in caught] == names


def test_backward_in_evaluation_and_under_autocast_runs_again_what_ran() -> None:
    layer, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Linear(WIDTH, 1)), torch.randn(4, WIDTH)
    found = []
    for call in (plainly, smp.checkpoint):
        torch.manual_seed(1)
        y = call(layer.train(), x)
        layer.eval()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(torch.autograd.grad(y.sum(), list(layer.parameters())))
    assert all(map(torch.equal, *found))
