"""Random models in random placements train as in one process, however slow units, sends and receives are.

hypothesis draws recipes, which are plain data: all ranks build the same model from one, and a failing one shrinks. The
examples are the same in every run; `-m slow` tries many.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from smpkit.torch.core.tensor_spec import tensors_in
from tests.models import WIDTH, Case, vectors
from tests.train import Way, same, train_with_sleeps

# No shrinking: each attempt starts ranks, and a failure that hangs would take its deadline again and again.
FEW = settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=400)

Branch: TypeAlias = tuple[str, tuple["Branch", ...]]
"""A module: its kind and what is in it."""


@dataclass(frozen=True)
class Recipe:
    """How to make a model, and how to train it.

    Args:
        layers: its modules.
        steps: which layer is called, with which earlier value its result is joined, and how.
        tied: index of the linear layer that shares the weight of the first one; 0 for none.
        functional_tie: use the first linear layer's weight once more, at the end.
        frozen: index of a linear layer that is not trained; -1 for none.
        outputs: what the model returns: a tensor, or a nest of them.
        way: microbatches, schedule and placement.
    """

    layers: tuple[Branch, ...]
    steps: tuple[tuple[int, int, str], ...]
    tied: int
    functional_tie: bool
    frozen: int
    outputs: str
    way: Way


LEAVES = st.sampled_from([("linear", ()), ("block", ()), ("pair", ())])
BRANCHES: st.SearchStrategy[Branch] = st.recursive(
    LEAVES,
    lambda inner: st.tuples(
        st.sampled_from(["sequence", "residual"]), st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=5,
)
JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda out, earlier: out + 0.5 * earlier,
    "cat": lambda out, earlier: torch.cat([out, earlier], -1)[..., ::2].tanh(),
    "where": lambda out, earlier: torch.where(earlier > 0, out, -out),
    "detach": lambda out, earlier: torch.stack([out, earlier.detach()]).mean(0),
    "alone": lambda out, _: out.tanh(),
    "in place": lambda out, earlier: operator.iadd(0.5 * out, earlier),
}
NESTED: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "tensor": lambda last, _: last,
    "tuple": lambda last, values: (last, values[0]),
    "dict": lambda last, values: {"last": last, "none": None, "first": values[0]},
    "nested": lambda last, values: {"outer": [last, (values[0], {"count": len(values)})], "name": "nested"},
}
STEPS = st.tuples(st.integers(0, 4), st.integers(0, 6), st.sampled_from([*JOINED]))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    way = Way(
        microbatches=draw(st.sampled_from([1, 2, 4, 8])),
        batches=draw(st.sampled_from([(8, 8), (8, 16, 8)])),
        placement=draw(st.one_of(st.none(), st.integers(0, 99))),
        config={"pipeline": draw(st.sampled_from(["interleaved", "simple"])), "timeout_seconds": 60},
    )
    return Recipe(
        # Two linear layers at least: every rank of three wants a unit.
        (("linear", ()), ("block", ()), *draw(st.lists(BRANCHES, min_size=1, max_size=3))),
        tuple(draw(st.lists(STEPS, min_size=2, max_size=7))),
        draw(st.integers(0, 3)),
        draw(st.booleans()),
        draw(st.integers(-1, 2)),
        draw(st.sampled_from([*NESTED])),
        way,
    )


class Grown(nn.Module):
    """A tree of modules: lists, sequences, skips, a block that is used again, shared weights, operations between."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.layers = nn.ModuleList([_module(branch) for branch in recipe.layers])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        linears = [each for each in self.modules() if isinstance(each, nn.Linear)]
        linears[recipe.tied % len(linears)].weight = linears[0].weight
        if recipe.frozen >= 0:
            linears[recipe.frozen].requires_grad_(False)
        self.first = linears[0] if recipe.functional_tie else None

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for layer, skip, kind in self.recipe.steps:
            out = self.layers[layer % len(self.layers)](values[-1])
            values.append(JOINED[kind](out, values[skip % len(values)]))
        last = values[-1] * self.scale
        if self.first is not None:
            last = functional.linear(last, self.first.weight)
        return NESTED[self.recipe.outputs](last, values[1:])


class Pair(nn.Module):
    """Returns a dict that the same module takes apart again, with something that is no tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = {"left": self.left(x).tanh(), "right": (self.right(x), None, 3)}
        return both["left"] + both["right"][0] / both["right"][2]


class Residual(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + torch.sin(part(x))
        return x


def _module(branch: Branch) -> nn.Module:
    kind, inner = branch
    if kind == "linear":
        return nn.Linear(WIDTH, WIDTH)
    if kind == "block":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
    if kind == "pair":
        return Pair()
    parts = [_module(each) for each in inner]
    return nn.Sequential(*parts) if kind == "sequence" else Residual(parts)


def loss_step(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    out = model(x)
    first, *others = tensors_in(out)
    loss = functional.mse_loss(first, y) + 0.1 * sum(other.square().mean() for other in others)
    model.backward(loss)
    return loss, out


def trains_as_in_one_process(recipe: Recipe, degree: int, seed: int | None) -> None:
    """Train the model of a recipe over a pipeline, with sleeps by the dice of a seed, or without."""
    by = None if seed is None else functools.partial(train_with_sleeps, seed)
    same(Case(functools.partial(Grown, recipe), vectors, loss_step), replace(recipe.way, pipeline=degree), by=by)


@FEW
@given(recipe=recipes())
def test_random_models_train_as_in_one_process(recipe: Recipe) -> None:
    trains_as_in_one_process(recipe, 2, None)


@settings(FEW, max_examples=2)
@given(recipe=recipes(), seed=st.integers(0, 10**6))
def test_random_sleeps_neither_hang_nor_change_a_result(recipe: Recipe, seed: int) -> None:
    trains_as_in_one_process(recipe, 3, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("degree", [2, 3, 4])
@MANY
@given(recipe=recipes(), seed=st.none() | st.integers(0, 10**6))
def test_many_random_models_with_sleeps_and_without(degree: int, recipe: Recipe, seed: int | None) -> None:
    trains_as_in_one_process(recipe, degree, seed)
