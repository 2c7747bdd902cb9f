"""Dropout drops the same activations on any number of pipeline ranks, and again when a layer is recomputed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp
from tests.models import WIDTH, Case, Square, Stack, by_torch, mse_step, plainly, vectors
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks, over_ranks
from tests.train import Trace, Way, batch, build, check_same, run, whole, world


class Layer(nn.Module):
    """A unit whose inside is called through `inside`."""

    def __init__(self, inside: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self._drop_twice, x)

    def _drop_twice(self, x: Tensor) -> Tensor:
        return functional.dropout(self.drop(self.linear(x)).tanh(), 0.2)


class Dropping(nn.Module):
    """Drops in leaves, in units, by functions between units, on inputs, and whole layers.

    Args:
        inside: calls what is in a unit.
        around: calls whole units, which Hugging Face's gradient checkpointing recomputes.
    """

    def __init__(self, inside: Callable[..., Any] = plainly, around: Callable[..., Any] = plainly) -> None:
        super().__init__()
        self.around = around
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.layers = nn.ModuleList([Layer(inside) for _ in range(4)])
        self.pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.1, self.training)
        x = self.drop(self.first(x))
        for layer in self.layers:
            if torch.rand([]) > 0.2:
                x = x + functional.dropout(self.around(layer, x), 0.5, self.training)
        return self.pair(x + 0.01 * torch.randn_like(x))


DROPPING = Case(Dropping, vectors, mse_step)
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing recomputed": {},
    "inside units": {"inside": by_torch},
    "units": {"around": by_torch},
}
ROWS = [
    ("inside units", Way()),
    ("units", Way()),
    ("nothing recomputed", Way(pipeline=2, placement=5)),
    ("units", Way(pipeline=2, placement=5)),
    ("nothing recomputed", Way(pipeline=4, placement=3)),
    ("units", Way(pipeline=4, placement=-1, config={"pipeline": "simple"})),
]


@pytest.fixture(scope="module")
def on_one_rank() -> Trace:
    [trace] = whole(run(DROPPING, Way()))
    assert len({float(loss) for step in trace.outputs for loss in step}) == 12, "microbatches drop alike"
    return trace


@pytest.mark.parametrize(("what", "way"), ROWS, ids=str)
def test_dropout_does_not_depend_on_the_pipeline_or_on_recomputation(what: str, way: Way, on_one_rank: Trace) -> None:
    for trace in run(Case(functools.partial(Dropping, **RECOMPUTED[what]), vectors, mse_step), way):
        check_same(trace, on_one_rank)


class Mixing(Stack):
    """Mixes hidden values with those of others, and labels alike, as manifold mixup does."""

    layer = Square

    def __init__(self) -> None:
        super().__init__(8)
        for parameter in self.parameters():
            (nn.init.eye_ if parameter.ndim == 2 else nn.init.zeros_)(parameter)

    def forward(self, x: Tensor) -> Tensor:
        labels = x
        for layer in self.layers:
            order, share = np.random.permutation(len(x)), random.random()
            x, labels = (each * share + each[order] * (1 - share) for each in (layer(x), labels))
        return (x - labels).abs().max()


@smp.step
def mixing_step(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    model.backward(loss)
    return loss


@on_ranks(2)
def test_ranks_that_take_microbatches_in_turns_draw_the_same_for_each() -> None:
    # Labels were mixed in another order than their values, on another rank, without a word.
    module = Mixing()
    model = over_ranks(module, {layer: number % 2 for number, layer in enumerate(module.layers)}, microbatches=4)
    for _ in range(2):
        before = np.random.get_state(legacy=False)["state"]["key"].tolist()
        assert max(mixing_step(model, torch.randn(16, WIDTH)).outputs) < 1e-5
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before


@on_ranks(1)
def test_a_step_gives_the_generators_back_as_they_were() -> None:
    with world(Way(microbatches=2)):
        model = smp.DistributedModel(build(DROPPING))
        before = torch.get_rng_state()
        smp.step(mse_step)(model, *batch(DROPPING, 0, 4))
        assert torch.equal(before, torch.get_rng_state())


def interrupted(folder: str, way: Way, *, resume: bool) -> list[float]:
    """Return the losses of four steps, the last two after a checkpoint: in the same job or in another one."""
    losses = []
    for steps in (range(2), range(2, 4)):
        with world(way):
            model = smp.DistributedModel(build(DROPPING))
            if steps[0]:
                smp.resume_from_checkpoint(folder)
            step = smp.step(mse_step)
            numbers = steps if resume else range(4)
            losses += [step(model, *batch(DROPPING, number, 8)).reduce_mean().item() for number in numbers]
            if not resume:
                return losses
            smp.save_checkpoint(folder, f"after {steps[-1]}")
    return losses


@pytest.mark.parametrize("way", [Way(), Way(pipeline=2), Way(replicas=2)], ids=str)
def test_dropout_goes_on_after_a_checkpoint_as_if_nothing_had_happened(way: Way, tmp_path: Path) -> None:
    expected = run_ranks(functools.partial(interrupted, resume=False), way.ranks, "", way)
    assert run_ranks(functools.partial(interrupted, resume=True), way.ranks, str(tmp_path), way) == expected
