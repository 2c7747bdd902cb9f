"""What training scripts do around their steps over a pipeline gives what it gives in one process."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import smpkit.torch as smp
from smpkit.torch.step import StepOutput
from tests.models import WIDTH, mse_step, sequential, vectors
from tests.ranks import run_ranks
from tests.train import Plain, Way, in_turn, place

MICROBATCHES = 2


def batch(number: int) -> tuple[Any, ...]:
    return vectors(8, torch.Generator().manual_seed(number))


class Run:
    """A script's surroundings: one process, or with `degree` a pipeline of smpkit's."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        if degree:
            smp.init(Way(degree, microbatches=MICROBATCHES, placement=-1).init)
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


def lightning(run: Run) -> Any:
    """Train a LightningModule by its own training_step and optimizer, in a loop that is not Lightning's."""
    library: Any = importlib.import_module("lightning.pytorch")  # which takes seconds

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = sequential()

        def forward(self, x: Tensor) -> Any:
            return self.layers(x)

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = functional.mse_loss(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

    def training_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model.module.training_step((x, y), 0)
        model.backward(loss)
        return loss

    model = run.model(Module())
    optimizer, step, results = run.sgd(model.parameters()), run.step(training_step), []
    for number in range(3):
        optimizer.zero_grad()
        results.append(losses(step(model, *batch(number))))
        optimizer.step()
    return results, model


def follow(script: Callable[[Run], Any], degree: int) -> Any:
    """Return what a script tells, and the weights and buffers after it."""
    warnings.simplefilter("ignore")  # torch's on the order of scheduler and optimizer, where a scaler skips a step
    torch.set_default_dtype(torch.float64)
    results, model = script(Run(degree))
    return results, dict((model if degree else model.module).state_dict())


@pytest.mark.parametrize("script", [freezing, playing, scaling, scheduling, lightning])
def test_what_scripts_do_around_steps_gives_what_it_gives_in_one_process(script: Callable[[Run], Any]) -> None:
    [plain] = run_ranks(follow, 1, script, 0)
    for results in run_ranks(follow, 2, script, 2):
        torch.testing.assert_close(results, plain, rtol=1e-10, atol=1e-12)
