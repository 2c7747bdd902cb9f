"""Checkpointing as people write it, over two pipeline ranks: the examples of SMP v1's documentation and others."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential as torch_checkpoint_sequential

import smpkit.torch as smp
from smpkit.torch import checkpoint, checkpoint_sequential
from tests import models as hugging_face
from tests.models import WIDTH, Case, block, mse_step, tokens, vectors
from tests.ranks import RankFailed, run_ranks
from tests.torch.pipeline.training import Setup, check_same, train, train_plainly

Call = Callable[..., Any]
SETUP = Setup(microbatches=4, batches=(8, 8))


def plainly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


class Counted(nn.Module):
    """Counts the calls of all of its objects in this process."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


# --- the documentation's first two examples ---------------------------------------------------------------------------


class Convolutions(nn.Module):
    """A module in `forward`."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 16), nn.Linear(16, 10)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.conv2(self.conv1(x)), 2)
        x = self.call(self.fc1, torch.flatten(x, 1))
        return functional.log_softmax(self.fc2(x), 1)


class Stack(nn.Module):
    """An `nn.Sequential`."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()]
        self.seq = nn.Sequential(*convolutions, nn.Linear(16, 10))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(self.call(self.seq, x), 1)


def images(size: int, generator: torch.Generator) -> tuple[Any, ...]:
    pixels = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(10, (size,), generator=generator)


def likelihood_step(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    loss = functional.nll_loss(model(pixels), labels)
    model.backward(loss)
    return loss


# --- further models ---------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Blocks that are called through `call`, with a residual between them."""

    def __init__(self, call: Call, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Counted() for _ in range(count)])
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.call(layer, x)
        return x


class Chain(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Counted() for _ in range(4)])
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.call(self.layers, x)
        return result


class Halves(nn.Module):
    """Checkpoints modules that may lie on several ranks: a module of layers, and a Sequential."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.body, self.tail = Layers(plainly, 6), nn.Sequential(block(), nn.Tanh())
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.call(self.tail, self.call(self.body, x))
        return result


def by_torch(reentrant: bool, module: nn.Module, x: Tensor) -> Any:
    return torch_checkpoint(module, x, use_reentrant=reentrant)


def in_segments(module: nn.Sequential, x: Tensor) -> Any:
    return torch_checkpoint_sequential(module, len(module), x, use_reentrant=False)


def by_twos(module: nn.Sequential, x: Tensor) -> Any:
    """Recompute two layers at a time, wherever they lie."""
    return torch_checkpoint_sequential(module, len(module) // 2, x, use_reentrant=False)


GROUPED = [partial(checkpoint_sequential, strategy=strategy) for strategy in ("each", "contiguous", "group_2")]
MODELS: dict[str, tuple[Any, Any, Any, list[Any]]] = {
    "a module in forward": (Convolutions, images, likelihood_step, [checkpoint]),
    "a Sequential": (Stack, images, likelihood_step, GROUPED),
    "layers in a loop": (Layers, vectors, mse_step, [checkpoint, partial(by_torch, False), partial(by_torch, True)]),
    "a chain": (Chain, vectors, mse_step, [*GROUPED, checkpoint, in_segments, by_twos]),
}


def compare(name: str, how: int, setup: Setup, degree: int) -> None:
    """Compare training with checkpointing over a pipeline to training without it in one process."""
    build, batch, step, calls = MODELS[name]
    plain = train_plainly(Case(lambda: build(plainly), batch, step), setup)
    ours = train(Case(lambda: build(calls[how]), batch, step), setup, degree)
    check_same(ours, plain)


def compare_all(name: str) -> None:
    for how in range(len(MODELS[name][3])):
        for seed in (None, 3) if how == 0 else (3,):
            compare(name, how, Setup(4, seed=seed, batches=(8, 8)), 2)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_calls_train_as_plain_ones_in_one_process(name: str) -> None:
    run_ranks(compare_all, 2, name)


# --- what is computed again -------------------------------------------------------------------------------------------


def count(how: int, name: str) -> tuple[int, int]:
    """Return how many layers this rank holds, and how often they were called in a step of 4 microbatches."""
    build, batch, step, calls = MODELS[name]
    Counted.calls = 0
    trace = train(Case(lambda: build(calls[how]), batch, step), Setup(4, seed=-1, batches=(4,)), 2)
    return len({name.split(".")[1] for name in trace.gradients}), Counted.calls


@pytest.mark.parametrize(("name", "how"), [("layers in a loop", 0), ("a chain", 0), ("a chain", 1), ("a chain", 2)])
def test_every_layer_is_computed_twice(name: str, how: int) -> None:
    for layers, calls in run_ranks(count, 2, how, name):
        assert layers == 2
        assert calls == 2 * 4 * layers


# --- the documentation's third example --------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.get_submodule("transformer.h" if hasattr(model, "transformer") else "model.layers")  # type: ignore[return-value]


def checkpointed(build: Callable[[], nn.Module], how: str) -> nn.Module:
    model = build().train()
    if how == "ours":
        smp.set_activation_checkpointing(layers_of(model))
    else:
        options = {"use_reentrant": how == "theirs, reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
    return model


OFFLOADING = dataclasses.replace(SETUP, options={"offload_activations": True, "activation_loading_horizon": 1})


def compare_hugging_face(how: str) -> list[tuple[int, int]]:
    """Compare, and return for each model how often the first modules of this rank's layers ran, and the bytes out."""
    counts = []
    for build in (hugging_face.gpt2, hugging_face.llama):
        runs: list[None] = []
        moved = [0]

        def counting(*_: Any, runs: list[None] = runs) -> None:
            runs.append(None)

        def made(build: Callable[[], nn.Module] = build, counting: Callable[..., None] = counting) -> nn.Module:
            model = checkpointed(build, how)
            for layer in layers_of(model):
                next(layer.children()).register_forward_pre_hook(counting)
            return model

        def step(model: Any, ids: Tensor, labels: Tensor, moved: list[int] = moved) -> Tensor:
            if isinstance(model, smp.DistributedModel):  # the step before; this one has just begun
                moved.append(smp.offload_report().bytes_out)
            return hugging_face.loss_inside_step(model, ids, labels)

        plain = train_plainly(Case(build, tokens, step), SETUP)
        check_same(train(Case(made, tokens, step), OFFLOADING, 2), plain)
        counts.append((len(runs), max(moved)))
    return counts


@pytest.mark.parametrize("how", ["ours", "theirs", "theirs, reentrant"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_layers_of_hugging_face_models(how: str) -> None:
    for model in zip(*run_ranks(compare_hugging_face, 2, how, timeout=120), strict=True):
        # 4 layers, 2 steps of 4 microbatches, twice each; more with the trace of the first step.
        assert sum(runs for runs, _ in model) >= 4 * 2 * 4 * 2
        # Inputs of 2 samples, 5 tokens and 8 numbers leave the first rank; the last one soon needs its own again.
        assert model[0][1] >= 2 * 2 * (2 * 5 * 8 * 8)


# --- modules that lie on several ranks --------------------------------------------------------------------------------


def train_halves(seed: int | None) -> list[str]:
    plain = train_plainly(Case(lambda: Halves(plainly), vectors, mse_step), SETUP)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = train(Case(lambda: Halves(smp.checkpoint), vectors, mse_step), dataclasses.replace(SETUP, seed=seed), 2)
    check_same(ours, plain)
    return [str(each.message) for each in caught if "checkpoint" in str(each.message)]


def test_a_module_on_several_ranks_runs_without_and_says_so_once() -> None:
    first, second = run_ranks(train_halves, 2, None)
    assert first == ["`body` is not checkpointed: it lies on pipeline ranks 0 and 1"]
    assert second == []


def set_for_all(manual: bool) -> list[str]:
    def build() -> nn.Module:
        model = Halves(plainly)
        smp.set_activation_checkpointing(model.body)
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Case(build, vectors, mse_step), Setup(4, seed=3 if manual else None), 2)
    return [str(each.message) for each in caught if "checkpoint" in str(each.message)]


def test_settings_for_a_module_on_several_ranks_are_dropped_and_that_is_said_once() -> None:
    assert run_ranks(set_for_all, 2, False) == [["`body` is not checkpointed: it lies on pipeline ranks 0 and 1"], []]


@pytest.mark.parametrize("function", [set_for_all, train_halves])
def test_a_module_that_was_placed_on_several_ranks_is_an_error(function: Any) -> None:
    with pytest.raises(
        RankFailed, match=r"`body` is to be checkpointed, but parts of it were placed on pipeline ranks"
    ):
        run_ranks(function, 2, True if function is set_for_all else 3)


class Around(nn.Module):
    """Recomputes code that calls layers of several ranks, one of them twice, and computes between them."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.layers, self.call = nn.ModuleList([Counted() for _ in range(4)]), call

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.call(self._inside, 1 * x)
        return result

    def _inside(self, x: Tensor) -> Tensor:
        for layer in (self.layers[2], *self.layers):
            x = x + layer(torch.dropout(2 * x, 0.0, True))
        return x.sin()


def train_around(reentrant: bool) -> int:
    call: Any = partial(by_torch, reentrant)
    plain = train_plainly(Case(lambda: Around(plainly), vectors, mse_step), SETUP)
    for pipeline, seed in (("interleaved", None), ("simple", 3), ("zero_bubble", -1)):
        setup = dataclasses.replace(SETUP, seed=seed, pipeline=pipeline)
        Counted.calls = 0
        check_same(train(Case(lambda: Around(call), vectors, mse_step), setup, 2), plain)
    return Counted.calls


@pytest.mark.parametrize("reentrant", [False, True])
def test_code_around_layers_of_several_ranks_recomputes_each_where_it_lies(reentrant: bool) -> None:
    # Each rank ran all of it again in backward, with weights that it does not have: the others' gradients were NaN.
    calls = run_ranks(train_around, 2, reentrant)
    assert calls == [2 * 2 * 4 * 2, 2 * 2 * 4 * 3]  # twice, two steps, four microbatches; rank 1 has one layer twice


# --- settings that change while training ------------------------------------------------------------------------------


def set_after_a_step() -> tuple[list[float], list[int]]:
    """Train three steps, with checkpointing from the second on and in another way from the third."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    torch.manual_seed(7)
    model = smp.DistributedModel(Chain(plainly))
    step = smp.step(mse_step)
    losses, calls = [], []
    for strategy in (None, "each", "contiguous"):
        if strategy is not None:
            smp.set_activation_checkpointing(model.get_module().get_submodule("layers"), strategy=strategy)
        batch = [each.float() for each in vectors(8, torch.Generator().manual_seed(1))]
        Counted.calls = 0
        losses.append(step(model, *batch).reduce_mean().item())
        calls.append(Counted.calls)
    smp.shutdown()
    return losses, calls


def test_settings_can_change_between_steps() -> None:
    for losses, calls in run_ranks(set_after_a_step, 2):
        assert losses[0] == losses[1] == losses[2]
        assert calls[1] == calls[2] == 2 * 2 * 4  # layers of this rank, microbatches


# --- failure ----------------------------------------------------------------------------------------------------------


class FailsAgain(nn.Module):
    """Runs once per microbatch, and not a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.runs = itertools.count(1)  # an object: simple attributes and lists are restored

    def forward(self, x: Tensor) -> Tensor:
        if next(self.runs) > 4:
            raise ValueError("not again")
        result: Tensor = self.linear(x).tanh()
        return result


def fail_in_backward() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "simple", "skip_tracing": True})
    model = smp.DistributedModel(nn.Sequential(block(), block(), FailsAgain(), block()))
    smp.set_activation_checkpointing(model.get_module())
    batch = [each.float() for each in vectors(8, torch.Generator().manual_seed(1))]
    smp.step(mse_step)(model, *batch)


def test_trap_13_an_exception_in_recomputation_ends_all_ranks_at_once() -> None:
    with pytest.raises(RankFailed, match=r"(?s)run_backward\(.*ValueError: not again"):
        run_ranks(fail_in_backward, 2)
