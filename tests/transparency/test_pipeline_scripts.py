"""What training scripts do around their steps over a pipeline gives what it gives in one process, or is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import smpkit.torch as smp
from smpkit.errors import SmpkitError, UsageError
from smpkit.torch.step import StepOutput
from tests.models import WIDTH, mse_step, sequential, vectors
from tests.ranks import run_ranks
from tests.torch.steps import error_of, on_ranks
from tests.train import Plain, in_turn, place

MICROBATCHES = 2


def batch(number: int) -> tuple[Tensor, Tensor]:
    x, y = vectors(8, torch.Generator().manual_seed(number))
    return x.to(torch.get_default_dtype()), y.to(torch.get_default_dtype())


class Run:
    """A script's surroundings: one process, or with `degree` a pipeline of smpkit's."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        if degree:
            config = {"pipeline_parallel_degree": degree, "microbatches": MICROBATCHES, "timeout_seconds": 600}
            smp.init({**config, "ddp": True, "auto_partition": False, "default_partition": 0})
        torch.manual_seed(7)

    def model(self, module: nn.Module) -> Any:
        if not self.degree:
            return Plain(module, MICROBATCHES)
        place(module, -1, self.degree)
        return smp.DistributedModel(module)

    def sgd(self, parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return smp.DistributedOptimizer(optimizer) if self.degree else optimizer

    def step(self, body: Callable[..., Any]) -> Callable[..., Any]:
        return smp.step(body) if self.degree else in_turn(body, MICROBATCHES)

    def scaler(self, **options: Any) -> Any:
        return smp.amp.GradScaler("cpu", **options) if self.degree else torch.amp.GradScaler("cpu", **options)


def losses(output: Any) -> list[float]:
    assert isinstance(output, StepOutput)
    return [each.item() for each in output.outputs]


# --- what works ---------------------------------------------------------------------------------------------------


def freezing(run: Run) -> Any:
    """Train some layers, then others, then all: what units return needs gradients or does not."""
    model = run.model(sequential())
    optimizer, step, results = run.sgd(model.parameters()), run.step(mse_step), []
    for number, frozen in enumerate([("0", "4"), (), ("0", "4"), ("0", "2"), ("6",), ()]):
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        optimizer.zero_grad()
        results.append(losses(step(model, *batch(number))))
        optimizer.step()
    return results, model


class Game(nn.Module):
    """Two models in one, which is how a GAN is trained here."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = sequential(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, *, makes: bool, judges: bool) -> Tensor:
        x = self.maker(x) if makes else x
        return self.judge(x) if judges else x


def judge_step(model: Any, noise: Tensor, real: Tensor) -> Tensor:
    drawn = model(noise, makes=True, judges=False).detach()
    judged = model(drawn, makes=False, judges=True)
    loss = functional.softplus(judged).mean() + functional.softplus(-model(real, makes=False, judges=True)).mean()
    model.backward(loss)
    return loss


def maker_step(model: Any, noise: Tensor) -> Tensor:
    loss = functional.softplus(-model(noise, makes=True, judges=True)).mean()
    model.backward(loss)
    return loss


def playing(run: Run) -> Any:
    """Train one half with the other frozen, and the other way round."""
    model = run.model(Game())
    halves = model.module.judge, model.module.maker
    optimizers = [run.sgd(half.parameters()) for half in halves]
    steps, results = [run.step(judge_step), run.step(maker_step)], []
    for number in range(6):
        turn = number % 2
        halves[turn].requires_grad_(True)
        halves[1 - turn].requires_grad_(False)
        optimizers[turn].zero_grad()
        results.append(losses(steps[turn](model, *batch(number)[: 2 - turn])))
        optimizers[turn].step()
    return results, model


def scaling(run: Run) -> Any:
    """Scale losses where the default dtype is not float32, with a step that is skipped."""
    model = run.model(sequential())
    optimizer, scaler, results = run.sgd(model.parameters()), run.scaler(init_scale=64.0, growth_interval=2), []

    def scaled_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = functional.mse_loss(model(x), y)
        model.backward(scaler.scale(loss))
        return loss

    step = run.step(scaled_step)
    for number in range(4):
        x, y = batch(number)
        optimizer.zero_grad()
        step(model, x, y * (float("inf") if number == 1 else 1.0))
        scaler.step(optimizer)
        scaler.update()
        results.append(scaler.get_scale())
    return results, model


def scheduling(run: Run) -> Any:
    """Let schedulers change rates, gradients add up over steps, and a group come later."""
    model = run.model(sequential())
    parameters = list(model.parameters())
    optimizer, step, results = run.sgd(parameters[:4]), run.step(mse_step), []
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    cycle = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
    for number in range(6):
        results.append(losses(step(model, *batch(number))))
        if number == 2:
            optimizer.add_param_group({"params": parameters[4:], "lr": 0.01, "momentum": 0.5})
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            (plateau.step(1.0) if number > 2 else cycle.step())
        results.append([group["lr"] for group in optimizer.param_groups])
    return results, model


def follow(script: Callable[[Run], Any], degree: int) -> Any:
    """Return what a script tells, and the weights and buffers after it."""
    warnings.simplefilter("ignore")  # torch's on the order of scheduler and optimizer, where a scaler skips a step
    torch.set_default_dtype(torch.float64)
    results, model = script(Run(degree))
    return results, dict((model if degree else model.module).state_dict())


@pytest.mark.parametrize("script", [freezing, playing, scaling, scheduling])
def test_what_scripts_do_around_steps_gives_what_it_gives_in_one_process(script: Callable[[Run], Any]) -> None:
    [plain] = run_ranks(follow, 1, script, 0)
    for results in run_ranks(follow, 2, script, 2):
        torch.testing.assert_close(results, plain, rtol=1e-10, atol=1e-12)


# --- what is refused ----------------------------------------------------------------------------------------------


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


def weight_made_by_another(layers: Any, x: Tensor) -> Tensor:
    weight = layers[0](torch.eye(WIDTH, dtype=x.dtype))
    return torch.func.functional_call(layers[1], {"weight": weight}, (x,))


def made_sparse(layers: Any, x: Tensor) -> Tensor:
    return layers[1](torch.sparse.mm(layers[0](x).to_sparse(), torch.eye(WIDTH, dtype=x.dtype)))


def mapped(layers: Any, x: Tensor) -> Tensor:
    return torch.vmap(nn.Sequential(*layers))(x)


def assigning_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.module[0].weight.requires_grad = False
    return mse_step(model, x, y)


def compiled(part: str) -> nn.Module:
    """Return a model that is compiled, or whose second half is."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), sequential())
    module.get_submodule(part).compile()
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Sequential(sequential(), sequential()), sequential())
    module[0].register_full_backward_hook(lambda _module, _inputs, _outputs: None)
    return module


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


class Calling(nn.Linear):
    """Calls a module that it is given, as x-transformers' attention calls the bias of positions."""

    def forward(self, x: Tensor, other: nn.Module | None = None) -> Tensor:
        return super().forward(x if other is None else other(x))


def handed_on_as_a_module(layers: Any, x: Tensor) -> Tensor:
    return layers[1](layers[0](x), layers[0])


class Nesting(nn.Linear):
    """Returns a tensor of rows of several lengths."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "buffer": (sharing, "book`, which modules on pipeline ranks 0 and 1 share"),
    "in an object": (
        lambda: Two(handed_on_in_an_object, Recalling),
        "`add` was called inside a layer on a value that another pipeline",
    ),
    "module as an argument": (
        lambda: Two(handed_on_as_a_module, Calling),
        "`layers.0`, whose weights pipeline rank 0 holds, was called inside a layer, on rank 1",
    ),
    "gathered": (lambda: Two(gathered), "`all_gather` of torch.distributed was called on a value that another"),
    # One rank trained with other statistics than the others: a teacher's, or a judge's beside the model.
    "statistics of every rank": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Normalising(), nn.Linear(WIDTH, WIDTH)),
        "`batch_norm` got a value of one pipeline rank and running statistics that every rank has",
    ),
    "nested": (
        lambda: nn.Sequential(Nesting(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        "`0` returned a nested or a sparse tensor",
    ),
    "sparse": (lambda: Two(made_sparse), "`to_sparse` returned a nested or a sparse tensor"),
    "weight made by another": (lambda: Two(weight_made_by_another), "in a weight's place (torch.func.functional_call)"),
    "mapped": (lambda: Two(mapped), "torch.vmap was called around `layers"),
    "weight": (lambda: Two(weight_changed), "`mul_` changed in place, between"),
    "freezing": (sequential, "a step froze or unfroze a parameter of shape [6, 6]"),
    "hooked": (hooked, "a full backward hook was registered on a module whose parts lie on several"),
    "compiled": (lambda: compiled("1"), "torch.compile was asked to compile `1`, which lies on several"),
    "all compiled": (lambda: compiled(""), "torch.compile was asked to compile the whole model"),
}


def refused(name: str) -> str:
    build, _ = REFUSED[name]
    run, step = Run(2), assigning_step if name == "freezing" else mse_step
    model = run.model(build())
    return error_of(lambda: run.step(step)(model, *batch(0)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_follow_is_refused(name: str) -> None:
    for message in run_ranks(refused, 2, name):
        assert REFUSED[name][1] in message


@on_ranks(2)
def test_lazy_models_copies_and_optimizers_that_need_the_whole_are_refused() -> None:
    run = Run(2)
    with pytest.raises(UsageError) as lazy:
        smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)))
    model = run.model(sequential())
    with pytest.raises(SmpkitError) as copied:
        copy.deepcopy(model)
    # By a norm of its own part, each rank climbed or clipped otherwise.
    of_all = [torch.optim.LBFGS, *(type(name, (torch.optim.SGD,), {}) for name in ("SAM", "GSAM", "DAdaptAdam"))]
    clipping = torch.optim.SGD(model.parameters())
    clipping.defaults["max_grad_norm"] = 1.0  # as timm's Lamb and others
    for optimizer in (*(rule(model.parameters()) for rule in of_all), clipping):
        with pytest.raises(SmpkitError) as optimized:
            smp.DistributedOptimizer(optimizer)
        assert optimized.value.message.startswith(f"{type(optimizer).__name__} looks at all parameters at once")
    smp.DistributedOptimizer(smp.optimizers.FusedLAMB(model.parameters()))
    assert lazy.value.message == "`1.weight` has no shape yet: its module is a lazy one"
    assert copied.value.message.startswith("a DistributedModel was copied or pickled")


@on_ranks(2)
def test_a_synchronised_norm_waits_for_replicas_and_not_for_other_stages() -> None:
    # Torch's default is all ranks of the job; on a CPU its forward is refused by torch.
    norm = nn.SyncBatchNorm(WIDTH)
    Run(2).model(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm))
    assert norm.process_group is smp.get_dp_process_group()


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
    model = Run(2).model(module)
    message = error_of(lambda: smp.step(mse_step)(model, *batch(0)))
    assert "after forward hooks that ran on other ranks only, on `layers." in message


@on_ranks(2)
def test_a_layer_of_another_rank_cannot_be_called_between_steps() -> None:
    run = Run(2)
    module = sequential()
    model = run.model(module)
    run.step(mse_step)(model, *batch(0))
    rank, x = smp.pp_rank(), torch.ones(2, WIDTH)
    own, other = module.get_submodule(["0", "6"][rank]), module.get_submodule(["6", "0"][rank])
    assert own(x).isfinite().all()
    with pytest.raises(UsageError) as caught:
        other(x)
    start = f"`{['6', '0'][rank]}`, whose weights pipeline rank {1 - rank} holds, was called outside a step"
    assert caught.value.message == f"{start}, on rank {rank}"


@on_ranks(2)
def test_ranks_that_freeze_different_parameters_are_named() -> None:
    run = Run(2)
    model, step = run.model(sequential()), run.step(mse_step)
    step(model, *batch(0))
    for parameter in model.local_parameters():
        parameter.requires_grad_(False)
    message = error_of(lambda: step(model, *batch(1)))
    assert "pipeline rank 1 took another way" in message
    assert "`a step with 4 frozen parameters" in message


@on_ranks(2)
def test_this_ranks_parameters_before_they_are_known_come_with_a_warning() -> None:
    # An average of weights that was made of them went on with the weights of other layers, if these had the same shape.
    run = Run(2)
    model = run.model(sequential())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(model.local_parameters())
    assert ["local_parameters() was called before the first step" in str(each.message) for each in caught] == [True] * (
        smp.rank() == 0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other = nn.Linear(1, 1)
        other(torch.ones(1)).sum().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # which looks whether these are parameters of the model
        run.step(mse_step)(model, *batch(0))
        assert 0 < len(list(model.local_parameters())) < len(before)
