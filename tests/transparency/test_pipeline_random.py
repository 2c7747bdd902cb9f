"""Dropout drops the same activations on any number of pipeline ranks, and again when a layer is recomputed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import smpkit.torch as smp
from tests.models import WIDTH, Case, mse_step, vectors
from tests.ranks import run_ranks
from tests.torch.pipeline.training import Setup, Trace, batch, build, train, world


class Recomputed(nn.Module):
    """A unit whose inside is computed again in backward, or not."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self._inside(x)
        result: Tensor = checkpoint(self._inside, x, use_reentrant=False)
        return result

    def _inside(self, x: Tensor) -> Tensor:
        return functional.dropout(self.drop(self.linear(x)).tanh(), 0.2)


class Dropping(nn.Module):
    """Drops in leaves, in units, by functions between units, on inputs, and whole layers."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.layers = nn.ModuleList([Recomputed(recompute) for _ in range(4)])
        self.pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.1, self.training)
        x = self.drop(self.first(x))
        for layer in self.layers:
            if torch.rand([]) > 0.2:
                x = x + functional.dropout(layer(x), 0.5, self.training)
        result: Tensor = self.pair(x + 0.01 * torch.randn_like(x))
        return result


class RecomputedInside(Dropping):
    def __init__(self) -> None:
        super().__init__(recompute=True)


class RecomputedAround(Dropping):
    """Recomputes whole units, as Hugging Face's gradient checkpointing does."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.1, self.training)
        x = self.drop(self.first(x))
        for layer in self.layers:
            if torch.rand([]) > 0.2:
                made = checkpoint(layer, x, use_reentrant=False)
                x = x + functional.dropout(made, 0.5, self.training)
        result: Tensor = self.pair(x + 0.01 * torch.randn_like(x))
        return result


CASES = tuple(Case(model, vectors, mse_step) for model in (Dropping, RecomputedInside, RecomputedAround))
SETUPS = {1: (Setup(4),), 2: (Setup(4), Setup(4, seed=5)), 4: (Setup(4, "simple", -1), Setup(4, seed=3))}


def train_all(degree: int) -> list[Trace]:
    return [train(case, setup, degree) for setup in SETUPS[degree] for case in CASES]


def test_dropout_does_not_depend_on_the_pipeline_or_on_recomputation() -> None:
    traces = [trace for degree in SETUPS for rank in run_ranks(train_all, degree, degree) for trace in rank]
    first = traces[0]
    assert len({float(loss) for step in first.outputs for loss in step}) == 12, "microbatches drop alike"
    for trace in traces[1:]:
        torch.testing.assert_close(trace.outputs, first.outputs, rtol=1e-11, atol=1e-11)
        for name, gradient in trace.gradients.items():
            torch.testing.assert_close(gradient, first.gradients[name], rtol=1e-11, atol=1e-11)


def generator_after_a_step() -> bool:
    case, setup = CASES[0], Setup(2)
    with world(setup, 1):
        model = smp.DistributedModel(build(case))
        before = torch.get_rng_state()
        smp.step(case.step)(model, *batch(case, 0, 4))
        return torch.equal(before, torch.get_rng_state())


def test_a_step_gives_the_generators_back_as_they_were() -> None:
    assert run_ranks(generator_after_a_step, 1) == [True]


class FunctionRecomputed(nn.Module):
    """Recomputes operations between units: possible where one rank holds everything."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self._inside(x)
        result: Tensor = checkpoint(self._inside, x, use_reentrant=False)
        return result

    def _inside(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(functional.dropout(self.first(x).tanh(), 0.5))
        return result


def gradient_beside_difference() -> tuple[float, float]:
    """Return a gradient as backward computes it and as the losses of two steps with the same dropout tell it."""
    case = Case(lambda: FunctionRecomputed(True), vectors, mse_step)
    with world(Setup(1), 1):
        model = smp.DistributedModel(build(case))
        step, losses, weight = smp.step(case.step), [], next(model.parameters())
        for change in (1e-6, -2e-6):
            with torch.no_grad():
                weight[0, 0] += change
            losses.append(step(model, *batch(case, 0, 4)).reduce_mean().item())
            assert model.engine.random is not None
            model.engine.random.step = 0
        assert weight.grad is not None
        return float(weight.grad[0, 0]) / 2, (losses[0] - losses[1]) / 2e-6


def test_an_operation_between_units_that_is_recomputed_drops_the_same() -> None:
    ((gradient, difference),) = run_ranks(gradient_beside_difference, 1)
    assert gradient == pytest.approx(difference, rel=1e-6)


def interrupted(folder: str, degree: int, replicas: int, *, resume: bool) -> list[float]:
    """Return the losses of four steps, the last two after a checkpoint: in the same job or in another one."""
    case, losses = Case(Dropping, vectors, mse_step), []
    for steps in (range(2), range(2, 4)):
        with world(Setup(4, replicas=replicas), degree):
            model = smp.DistributedModel(build(case))
            if steps[0]:
                smp.resume_from_checkpoint(folder)
            step = smp.step(case.step)
            numbers = steps if resume else range(4)
            losses += [step(model, *batch(case, number, 8)).reduce_mean().item() for number in numbers]
            if not resume:
                return losses
            smp.save_checkpoint(folder, f"after {steps[-1]}")
    return losses


@pytest.mark.parametrize(("degree", "replicas"), [(1, 1), (2, 1), (1, 2)])
def test_dropout_goes_on_after_a_checkpoint_as_if_nothing_had_happened(
    degree: int, replicas: int, tmp_path: Path
) -> None:
    size = degree * replicas
    for whole, parts in zip(
        run_ranks(functools.partial(interrupted, resume=False), size, "", degree, replicas),
        run_ranks(functools.partial(interrupted, resume=True), size, str(tmp_path), degree, replicas),
        strict=True,
    ):
        assert whole == parts
