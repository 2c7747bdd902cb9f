"""Checkpointing as people write it, over two pipeline ranks: the examples of SMP v1's documentation and others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential as torch_checkpoint_sequential

import smpkit.torch as smp
from smpkit.testing.ranks import RankFailed
from smpkit.torch import checkpoint, checkpoint_sequential
from tests.models import MODELS, WIDTH, Case, block, by_torch, mse_step, plainly, vectors
from tests.models_of_others import TRANSFORMERS
from tests.pairwise import slow
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks
from tests.train import Trace, Way, batch, check_same, checkpoint_layers, same, trace_of, train, train_plainly, training

Call = Callable[..., Any]
WAY = Way(pipeline=2, batches=(8, 8))


class Calls(nn.Module):
    """Calls its layers through `call`, which `call_through` replaces."""

    call: Call = staticmethod(plainly)


def call_through(call: Call, model: Any) -> None:
    model.call = call


class Counted(nn.Module):
    """Counts the calls of all of its objects in this process."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return self.last(torch.tanh(self.first(x)))


# --- calls of layers --------------------------------------------------------------------------------------------------


class Layers(Calls):
    """Layers in a loop, with a residual between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([Counted() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.call(layer, x)
        return x


class Chain(Layers):
    """Layers of a Sequential, and between them modules that hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, fourth = self.layers
        self.layers = nn.Sequential(first, second, nn.ReLU(), third, nn.Flatten(), fourth)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers, x)


class Halves(Calls):
    """Calls modules that may lie on several ranks: a module of layers, and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tail = Layers(), nn.Sequential(block(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.tail, self.call(self.body, x))


class Around(Layers):
    """Calls code around layers of several ranks, one of them twice, that computes between them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self._inside, 1 * x)

    def _inside(self, x: Tensor) -> Tensor:
        for layer in (self.layers[2], *self.layers):
            x = x + layer(torch.dropout(2 * x, 0.0, True))
        return x.sin()


def reentrant(module: Any, x: Tensor) -> Any:
    return torch_checkpoint(module, x, use_reentrant=True)


def nested(module: Any, x: Tensor) -> Any:
    return torch_checkpoint(lambda x: by_torch(module, x), x, use_reentrant=False)


def by_twos(module: nn.Sequential, x: Tensor) -> Any:
    """Recompute two layers at a time, wherever they lie."""
    return torch_checkpoint_sequential(module, len(module) // 2, x, use_reentrant=False)


CASES = {
    "layers in a loop": Case(Layers, vectors, mse_step),
    "a chain": Case(Chain, vectors, mse_step),
    "modules on several ranks": Case(Halves, vectors, mse_step),
    "code around layers": Case(Around, vectors, mse_step),
}
CALLS: dict[str, Call] = {
    **{call.__name__: call for call in (checkpoint, by_torch, reentrant, nested, by_twos)},
    "group_2": partial(checkpoint_sequential, strategy="group_2"),
}
ROWS: list[Any] = [
    ("layers in a loop", "checkpoint", None),
    ("layers in a loop", "reentrant", 3),
    *[("a chain", call, 3) for call in ("by_twos", "group_2")],
    ("modules on several ranks", "checkpoint", None),
    # Each rank ran all of it again in backward, with weights that it does not have: the others' gradients were NaN.
    ("code around layers", "by_torch", 3),
]
MORE = [
    *[("layers in a loop", call, 3) for call in ("checkpoint", "by_torch")],
    ("code around layers", "reentrant", 3),
]


@pytest.mark.parametrize(("model", "call", "placement"), [*ROWS, *slow(MORE)])
def test_checkpointed_calls_train_as_plain_ones(model: str, call: str, placement: int | None) -> None:
    same(CASES[model], replace(WAY, placement=placement, prepare=partial(call_through, CALLS[call])))


def test_code_around_layers_trains_with_a_split_backward() -> None:
    way = replace(WAY, placement=-1, config={"pipeline": "zero_bubble"}, prepare=partial(call_through, reentrant))
    same(CASES["code around layers"], way)


# --- what is computed again, and what leaves --------------------------------------------------------------------------


OFFLOADED = replace(WAY, config={"offload_activations": True, "activation_loading_horizon": 1})


def bytes_out(case: Case, way: Way) -> tuple[Trace, list[int]]:
    """Return what came out, and how many bytes left this rank's device in each step."""
    with training(case, way) as trained:
        outputs = [trained.run(number) for number in range(len(way.batches))]
        return trace_of(outputs, trained.model), [step.bytes_out for step in smp.offload_report().steps]


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("call", ["by_torch", "reentrant", "nested"])
def test_inputs_of_torchs_checkpoint_leave_as_those_of_ours(call: str, pipeline: int) -> None:
    case, way = CASES["layers in a loop"], replace(OFFLOADED, pipeline=pipeline)
    found, expected = (
        run_ranks(bytes_out, pipeline, case, replace(way, prepare=partial(call_through, CALLS[each])))
        for each in (call, "checkpoint")
    )
    for (ours, moved), (theirs, as_many) in zip(found, expected, strict=True):
        check_same(ours, theirs, 0)
        assert moved == as_many
    assert min(found[0][1]) > 0


# --- the documentation's third example: layers of Hugging Face models -------------------------------------------------


def recompute_layers(model: Any) -> None:
    smp.set_activation_checkpointing(model.transformer.h)


def recompute_by_its_own_means(model: Any) -> None:
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize(("model", "how"), [("GPT-2", recompute_layers), ("Llama", recompute_by_its_own_means)])
def test_layers_of_hugging_face_models_whose_inputs_leave(model: str, how: Callable[[Any], None]) -> None:
    way = replace(OFFLOADED, prepare=how)
    found = run_ranks(bytes_out, 2, MODELS[model], way)
    for trace, _ in found:
        check_same(trace, train_plainly(MODELS[model], way.plain)[0])
    # Inputs of 2 samples, 5 tokens and 8 numbers leave the first rank; the last one soon needs its own again.
    assert min(found[0][1]) >= 2 * 2 * (2 * 5 * 8 * 8)


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == "GPT-NeoX" else pytest.mark.slow) for name in TRANSFORMERS]
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")  # MobileBERT's constructor
def test_layers_of_any_hugging_face_model_without_a_warning(model: str) -> None:
    way = Way(microbatches=2, batches=(4, 4))
    [plain] = train_plainly(TRANSFORMERS[model], way)
    [ours] = train_plainly(TRANSFORMERS[model], replace(way, prepare=checkpoint_layers))
    check_same(ours, plain, 0)


# --- modules that lie on several ranks --------------------------------------------------------------------------------


def checkpoint_body(model: Any) -> None:
    smp.set_activation_checkpointing(model.body)


@on_ranks(2)
def test_a_module_on_several_ranks_runs_without_and_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(CASES["modules on several ranks"], replace(WAY, prepare=checkpoint_body))
    texts = [str(each.message) for each in caught if "checkpoint" in str(each.message)]
    said = "`body` is not checkpointed: it lies on pipeline ranks 0 and 1"
    assert texts == ([said] if os.environ["RANK"] == "0" else [])


@pytest.mark.parametrize("prepare", [checkpoint_body, partial(call_through, checkpoint)], ids=["a setting", "a call"])
def test_a_module_that_was_placed_on_several_ranks_is_an_error(prepare: Callable[[Any], None]) -> None:
    with pytest.raises(RankFailed, match="`body` is to be checkpointed, but parts of it were placed on pipeline ranks"):
        same(CASES["modules on several ranks"], replace(WAY, placement=3, prepare=prepare))


# --- settings that change ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_settings_can_change_between_steps() -> None:
    """Compare losses, and how often this rank called layers: never checkpointed, and set anew before each step."""
    case, losses, calls = CASES["a chain"], list[float](), list[int]()
    for strategies in ((None, None, None), (None, "each", "contiguous")):
        with training(case, WAY) as trained:
            for number, strategy in enumerate(strategies):
                if strategy is not None:
                    smp.set_activation_checkpointing(
                        trained.model.get_module().get_submodule("layers"), strategy=strategy
                    )
                Counted.calls = 0
                losses.append(trained.step(*batch(case, number, 8)).reduce_mean().item())
                calls.append(Counted.calls)
    assert losses[3:] == losses[:3]
    assert calls[4:] == [2 * each for each in calls[1:3]]
