"""What ranks of a pipeline cannot follow, in models, steps and scripts, is refused with the cause and what to do."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import smpkit.torch as smp
from smpkit.errors import SmpkitError, UsageError
from smpkit.testing.ranks import RankFailed
from tests.models import WIDTH, Case, Stack, block, mse_step, sequential, vectors
from tests.ranks import run_ranks
from tests.torch.steps import MANY_SECONDS, error_of, on_ranks
from tests.train import Way, place, run
from tests.transparency.test_pipeline_users import Extending, Kept

WAY = Way(pipeline=2, microbatches=2, placement=-1, config={"timeout_seconds": MANY_SECONDS})


def over_two(module: nn.Module, **options: Any) -> Any:
    """Return a model whose units are dealt out to two ranks."""
    smp.init({**WAY.init, **options})
    place(module, -1, 2)
    return smp.DistributedModel(module)


def batch() -> tuple[Tensor, Tensor]:
    """Return a batch whose second microbatch has other values than its first."""
    x = torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(4, WIDTH)
    return x, x


NUMBERS = itertools.count()


# --- models that do something between two layers ----------------------------------------------------------------------


class Two(nn.Module):
    """Lets `function` do something with two layers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], layer: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(WIDTH, WIDTH) for _ in range(2)])
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layers, x)


def weight_changed(layers: Any, x: Tensor) -> Tensor:
    x = layers[0](x)
    with torch.no_grad():
        layers[0].weight.mul_(0.9)
    return layers[1](x)


def gathered(layers: Any, x: Tensor) -> Tensor:
    """Gather what a layer returns from all replicas, as contrastive losses do."""
    x = layers[0](x)
    parts = [torch.zeros_like(x)]
    torch.distributed.all_gather(parts, x, group=smp.get_dp_process_group())
    return layers[1](torch.cat(parts))


class Memory:
    """No container that anybody could look into."""

    __slots__ = ("first",)

    first: Tensor


class Recalling(nn.Linear):
    def forward(self, x: Tensor, memory: Memory) -> Tensor:  # type: ignore[override]
        return torch.add(memory.first, super().forward(x))


def handed_on_in_an_object(layers: Any, x: Tensor) -> Tensor:
    """Hand layers an object with a value in it, as caches of keys and values are handed on."""
    memory = Memory()
    memory.first = x
    for layer in layers:
        x = memory.first = layer(x, memory)
    return x


class Writing(nn.Linear):
    """Writes into a dict that it is given."""

    def forward(self, x: Tensor, seen: dict[str, Any]) -> Tensor:  # type: ignore[override]
        seen["last"] = super().forward(x)
        return seen["last"]


def handed_on_in_a_dict(layers: Any, x: Tensor) -> Tensor:
    seen: dict[str, Tensor] = {}
    return layers[1](layers[0](x, seen), seen) + seen["last"]


def handed_on_in_a_buffer(layers: Any, x: Tensor) -> Tensor:
    x = layers[1](layers[0](x))
    layers.mean = x.detach().mean(0)
    return x - layers.mean


def with_a_buffer() -> nn.Module:
    module = Two(handed_on_in_a_buffer)
    module.layers.register_buffer("mean", torch.zeros(WIDTH))
    return module


class Calling(nn.Linear):
    """Calls a module that it is given, as x-transformers' attention calls the bias of positions."""

    def forward(self, x: Tensor, other: nn.Module | None = None) -> Tensor:
        return super().forward(x if other is None else other(x))


# --- layers in a row --------------------------------------------------------------------------------------------------


class Leaving(nn.Linear):
    """Leaves a value as an attribute that is None at first."""

    left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.left = super().forward(x)
        return self.left


class Reading(nn.Linear):
    """Reads what another layer has left."""

    def __init__(self, other: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.others[0].left


def handed_on_as_an_attribute() -> nn.Module:
    first = Leaving(WIDTH, WIDTH)
    return nn.Sequential(first, Reading(first))


class Noting(nn.Linear):
    """Keeps a loss of its own as an attribute."""

    loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.loss = x.pow(2).mean()
        return x.tanh()


class Sharing(nn.Linear):
    """Changes a buffer in place that another layer has, too."""

    book: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.no_grad():
            self.book.lerp_(x.mean(0), 0.1)
        return x + self.book


def sharing() -> nn.Module:
    book, layers = torch.zeros(WIDTH), [Sharing(WIDTH, WIDTH) for _ in range(2)]
    for layer in layers:
        layer.register_buffer("book", book)
    return nn.Sequential(*layers)


class Normalising(nn.Module):
    """Normalises by statistics of its own, in a module without weights."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.variance, training=self.training)


class Nesting(nn.Linear):
    """Returns a tensor of rows of several lengths."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)


def compiled(part: str) -> nn.Module:
    """Return a model that is compiled, or whose second half is."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), sequential())
    module.get_submodule(part).compile()
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Sequential(sequential(), sequential()), sequential())
    module[0].register_full_backward_hook(lambda _module, _inputs, _outputs: None)
    return module


# --- steps ------------------------------------------------------------------------------------------------------------


def noted_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y) + sum(layer.loss for layer in model.module)
    model.backward(loss)
    return loss


def compiled_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Compile what calls the layers, as `torch.compile(smp.DistributedModel(model))` does."""
    loss: Tensor = torch.compile(model, backend="eager")(x).sum()
    return loss


def counting_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return mse_step(model, x, y)


def looking_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model(x)
    loss: Tensor = (model.module.kept.values[0] - y).square().mean()
    model.backward(loss)
    return loss


def gradient_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    prediction = model(x)
    (gradient,) = torch.autograd.grad(prediction.sum(), x, create_graph=True)
    loss = functional.mse_loss(prediction, y) + gradient.pow(2).mean()
    model.backward(loss)
    return loss


def returning_step(model: Any, x: Tensor, y: Tensor) -> Tensor | None:
    loss = mse_step(model, x, y)
    return loss if smp.pp_rank() == 0 else None


def assigning_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.module[0].weight.requires_grad = False
    return mse_step(model, x, y)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model, what is said on every rank, the step, and more for `smp.init`."""

    build: Callable[[], nn.Module]
    says: str
    step: Callable[..., Any] = mse_step
    config: Mapping[str, Any] = field(default_factory=dict)


def between(function: Callable[[Any, Tensor], Tensor], says: str, layer: type[nn.Linear] = nn.Linear) -> Row:
    return Row(functools.partial(Two, function, layer), says)


REFUSED = {
    "buffer": Row(sharing, "book`, which modules on pipeline ranks 0 and 1 share"),
    "in an object": between(
        handed_on_in_an_object, "`add` was called inside a layer on a value that another pipeline", Recalling
    ),
    "module as an argument": between(
        lambda layers, x: layers[1](layers[0](x), layers[0]),
        "`layers.0`, whose weights pipeline rank 0 holds, was called inside a layer, on rank 1",
        Calling,
    ),
    "gathered": between(gathered, "`all_gather` of torch.distributed was called on a value that another"),
    # One rank trained with other statistics than the others: a teacher's, or a judge's beside the model.
    "statistics of every rank": Row(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Normalising(), nn.Linear(WIDTH, WIDTH)),
        "`batch_norm` got a value of one pipeline rank and running statistics that every rank has",
    ),
    "nested": Row(
        lambda: nn.Sequential(Nesting(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        "`0` returned a nested or a sparse tensor",
    ),
    "sparse": between(
        lambda layers, x: layers[1](torch.sparse.mm(layers[0](x).to_sparse(), torch.eye(WIDTH))),
        "`to_sparse` returned a nested or a sparse tensor",
    ),
    "weight made by another": between(
        lambda layers, x: torch.func.functional_call(layers[1], {"weight": layers[0](torch.eye(WIDTH))}, (x,)),
        "in a weight's place (torch.func.functional_call)",
    ),
    "mapped": between(lambda layers, x: torch.vmap(nn.Sequential(*layers))(x), "torch.vmap was called around `layers"),
    "weight": between(weight_changed, "`mul_` changed in place, between"),
    "a layer's forward": between(
        lambda layers, x: layers[1](layers[0].forward(x)), "computed from weights, as by `layer.forward(x)`"
    ),
    "freezing": Row(sequential, "a step froze or unfroze a parameter of shape [6, 6]", assigning_step),
    "hooked": Row(hooked, "a full backward hook was registered on a module whose parts lie on several"),
    "compiled": Row(lambda: compiled("1"), "torch.compile was asked to compile `1`, which lies on several"),
    "all compiled": Row(lambda: compiled(""), "torch.compile was asked to compile the whole model"),
    # torch traced the calls, and the error was that of `torch.vmap`.
    "compiled around": Row(sequential, "torch.compile was asked to compile the whole model", compiled_step),
    "FLOPs counted": Row(sequential, "Count at pipeline_parallel_degree 1", counting_step),
    "a gradient penalty": Row(sequential, "take others inside a torch.nn.Module", gradient_step),
    "a result on one rank only": Row(sequential, "returned other things from the step", returning_step),
    # It trained, though `smpkit plan` showed no backward.
    "a backward where none is planned": Row(
        sequential, "`pipeline: _only_forward`", config={"pipeline": "_only_forward"}
    ),
    "a loss kept as an attribute": Row(
        lambda: nn.Sequential(*[Noting(WIDTH, WIDTH) for _ in range(2)]),
        "return it from the module's forward",
        noted_step,
    ),
    # Other ranks kept a copy of the first microbatch's for all later ones: wrong losses, and no gradients.
    "an object that a layer returns": Row(
        functools.partial(Extending, Kept), "`layers.0` returned an object of the type Kept", looking_step
    ),
    "another number that a layer returns": Row(
        lambda: Extending(lambda _: next(NUMBERS)), "`layers.0` returned 0 the first time and 1 now"
    ),
    # Ranks ended with a KeyError and a TypeError of None; the buffer was another one in each checkpoint.
    "a value handed on in a dict": between(
        handed_on_in_a_dict, "UsageError: `layers.0` wrote into a dict, a list or a data", Writing
    ),
    "a value handed on as an attribute": Row(
        handed_on_as_an_attribute, "may run on another pipeline rank, and then leaves nothing here"
    ),
    "a value handed on in a buffer": Row(
        with_a_buffer, "the buffer `mean` of `layers` was assigned a value that pipeline rank"
    ),
}


def refused(name: str) -> str:
    row = REFUSED[name]
    model = over_two(row.build(), **row.config)
    return error_of(lambda: smp.step(row.step)(model, *batch()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_follow_is_refused(name: str) -> None:
    first, second = run_ranks(refused, 2, name)
    assert REFUSED[name].says in second
    # Of an object that a layer returns the first rank has the real one, with a tensor in it.
    assert REFUSED[name].says in first or name == "an object that a layer returns"


class Stateful(nn.Linear):
    """A layer with a hidden state."""

    hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = torch.tanh(x if self.hidden is None else x + self.hidden)
        self.hidden = x.detach()
        return x


class Ring(Stack):
    """Goes round its layers three times: several microbatches are on their way through a layer at once."""

    layer = staticmethod(functools.partial(Stateful, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.hidden = None  # type: ignore[assignment]  # as recurrent and spiking models do before a sequence
        for _ in range(3):
            x = super().forward(x)
        return x


def test_a_tensor_that_a_module_keeps_where_a_rank_is_visited_again_is_refused() -> None:
    # Microbatches mixed what modules keep: the losses were other ones, without a word.
    message = r"`layers\.\d\.hidden`, a tensor that is neither a weight nor a buffer, changed in a microbatch"
    with pytest.raises(RankFailed, match=message):
        run(Case(Ring, vectors, mse_step), Way(pipeline=2, placement=-1))


# --- around and between steps -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_batch_that_does_not_divide_is_refused_on_every_rank() -> None:
    model = over_two(nn.Sequential(block(), block()), microbatches=4)
    with pytest.raises(UsageError, match=r"batch size 10 .* is not divisible by 4 microbatches"):
        smp.step(mse_step)(model, torch.ones(10, WIDTH), torch.ones(10, WIDTH))


@on_ranks(2)
def test_gradients_are_not_for_the_code_inside_a_step() -> None:
    # A step that did all of a loop's body trained nothing, without a word.
    model = over_two(sequential())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    calls: dict[str, Callable[[], object]] = {
        "optimizer.zero_grad": optimizer.zero_grad,
        "model.zero_grad": model.zero_grad,
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "optimizer.step": optimizer.step,
    }

    @smp.step
    def step(model: Any, x: Tensor) -> None:
        model.backward(model(x).sum())
        for name, call in calls.items():
            assert f"{name} was called inside a step" in error_of(call)
        calls.clear()  # later microbatches find gradients of this one

    step(model, torch.ones(4, WIDTH))


@on_ranks(2)
def test_lazy_models_copies_and_optimizers_that_need_the_whole_are_refused() -> None:
    smp.init(WAY.init)
    with pytest.raises(UsageError) as lazy:
        smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)))
    assert lazy.value.message == "`1.weight` has no shape yet: its module is a lazy one"
    model = smp.DistributedModel(sequential())
    with pytest.raises(SmpkitError) as copied:
        copy.deepcopy(model)
    assert copied.value.message.startswith("a DistributedModel was copied or pickled")
    # By a norm of its own part, each rank climbed or clipped otherwise.
    of_all = [torch.optim.LBFGS, *(type(name, (torch.optim.SGD,), {}) for name in ("SAM", "GSAM", "DAdaptAdam"))]
    clipping = torch.optim.SGD(model.parameters())
    clipping.defaults["max_grad_norm"] = 1.0  # as timm's Lamb and others
    for optimizer in (*(rule(model.parameters()) for rule in of_all), clipping):
        with pytest.raises(SmpkitError) as optimized:
            smp.DistributedOptimizer(optimizer)
        assert optimized.value.message.startswith(f"{type(optimizer).__name__} looks at all parameters at once")
    smp.DistributedOptimizer(smp.optimizers.FusedLAMB(model.parameters()))


@on_ranks(2)
def test_an_error_after_hooks_that_ran_elsewhere_says_so() -> None:
    """Take what hooks on layers have put into a dict."""
    outputs: dict[int, Tensor] = {}

    def recorded(layers: Any, x: Tensor) -> Tensor:
        layers[1](layers[0](x))
        return outputs[0] + outputs[1]

    module = Two(recorded)
    for number, layer in enumerate(module.layers):
        layer.register_forward_hook(lambda _layer, _given, out, number=number: outputs.update({number: out}))
    model = over_two(module)
    message = error_of(lambda: smp.step(mse_step)(model, *batch()))
    assert "after forward hooks that ran on other ranks only, on `layers." in message


class Clamped(nn.Linear):
    """Keeps its weights positive, as layers of convex networks do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(x)


@on_ranks(2, meets=False)
def test_an_error_about_a_weight_that_a_forward_has_written_to_says_when_to_write() -> None:
    # Torch's error about versions does not say what has changed, and on one rank there is none.
    model = over_two(nn.Sequential(block(), Clamped(WIDTH, WIDTH), block(), block()))
    message = error_of(lambda: smp.step(mse_step)(model, *batch()))
    expected = (
        "Write to it between steps" if smp.pp_rank() == 0 else "rank 0 failed: RuntimeError: one of the variables"
    )
    assert expected in message


@on_ranks(2)
def test_a_layer_of_another_rank_cannot_be_called_between_steps() -> None:
    module = sequential()
    model = over_two(module)
    smp.step(mse_step)(model, *batch())
    rank, x = smp.pp_rank(), torch.ones(2, WIDTH)
    own, other = ("0", "6")[rank], ("6", "0")[rank]
    assert module.get_submodule(own)(x).isfinite().all()
    with pytest.raises(UsageError) as caught:
        module.get_submodule(other)(x)
    start = f"`{other}`, whose weights pipeline rank {1 - rank} holds, was called outside a step"
    assert caught.value.message == f"{start}, on rank {rank}"


@on_ranks(2)
def test_ranks_that_freeze_different_parameters_are_named() -> None:
    model, step = over_two(sequential()), smp.step(mse_step)
    step(model, *batch())
    for parameter in model.local_parameters():
        parameter.requires_grad_(False)
    message = error_of(lambda: step(model, *batch()))
    assert "pipeline rank 1 took another way" in message
    assert "`a step with 4 frozen parameters" in message


@on_ranks(2)
def test_this_ranks_parameters_before_they_are_known_come_with_a_warning() -> None:
    # An average of weights that was made of them went on with the weights of other layers, if these had the same shape.
    model = over_two(sequential())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(model.local_parameters())
    texts = [str(each.message) for each in caught]
    assert len(texts) == (1 if smp.rank() == 0 else 0)
    assert all("local_parameters() was called before the first step" in each for each in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other = nn.Linear(1, 1)
        other(torch.ones(1)).sum().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # which looks whether these are parameters of the model
        smp.step(mse_step)(model, *batch())
        assert 0 < len(list(model.local_parameters())) < len(before)
