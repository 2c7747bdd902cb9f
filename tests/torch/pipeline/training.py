"""Train a case plainly and over a pipeline, and compare everything that came out."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.core.tree import children
from smpkit.torch.pipeline.transport import Transport
from smpkit.torch.placement.trace import units_of
from smpkit.torch.step import StepOutput, collate
from tests.models import Case
from tests.transparency.models import at_least

TOLERANCE = 1e-12  # float64; what differs is the order in which microbatches, users and ranks are added up


@dataclass(frozen=True)
class Setup:
    """How to train.

    Args:
        microbatches: how many per step.
        pipeline: `interleaved` or `simple`.
        seed: of the placement: None lets smpkit decide, -1 deals the units out evenly.
        batches: the batch size of each step and replica.
        options: further configuration.
        replicas: how many pipelines train on batches of their own.
    """

    microbatches: int = 4
    pipeline: str = "interleaved"
    seed: int | None = None
    batches: tuple[int, ...] = (8, 8, 8)
    options: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1


@dataclass
class Trace:
    """What training did in a replica: what each step returned, and the last gradients, weights and buffers it holds."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    values: dict[str, Tensor]


class Plain(nn.Module):
    """What a step function sees of a model, in one process."""

    def __init__(self, module: nn.Module, parts: int) -> None:
        super().__init__()
        self.module = module
        self.parts = parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [torch.ones_like(root) for root in roots] if gradients is None else gradients
        torch.autograd.backward(roots, [each / self.parts for each in given])


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.build().to(case.dtype)


def batch(case: Case, number: int, size: int, replica: int = 0) -> tuple[Any, ...]:
    return case.batch(size, torch.Generator().manual_seed(100 + number + 1000 * replica))


def part(value: Any, index: int, count: int) -> Any:
    return value.chunk(count)[index] if isinstance(value, Tensor) else value


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    # Not Adam: it turns rounding errors of gradients that are 0 in theory into steps of full size.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_plainly(case: Case, setup: Setup, replica: int = 0) -> Trace:
    """Train in one process, replica after replica and microbatch after microbatch, and return what `replica` saw."""
    model = Plain(build(case), setup.microbatches * setup.replicas)
    optimizer = optimizer_of([each for each in model.parameters() if each.requires_grad])
    outputs, buffers = [], _buffers(model)
    for number, size in enumerate(setup.batches):
        optimizer.zero_grad()
        first = buffers
        for index in range(setup.replicas):
            # Replicas begin a step with the buffers (running statistics) of the first, and change their own.
            _restore(model, first)
            returned = flat(collate(_microbatches(case, model, setup, batch(case, number, size, index))))
            if index == replica:
                outputs.append(returned)
                own = _buffers(model)
            if index == 0:
                buffers = _buffers(model)
        optimizer.step()
    _restore(model, own)
    return _trace(outputs, model.module, lambda _: True)


def _microbatches(case: Case, model: nn.Module, setup: Setup, whole: tuple[Any, ...]) -> list[Any]:
    count = setup.microbatches
    return [case.step(model, *[part(each, index, count) for each in whole]) for index in range(count)]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _restore(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


@contextlib.contextmanager
def world(setup: Setup, degree: int) -> Iterator[None]:
    """Initialise smpkit for `setup`, and shut it down if all went well."""
    placement = {} if setup.seed is None else {"auto_partition": False, "default_partition": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one microbatch over two ranks trains right, if not fast
        smp.init(
            {
                "pipeline_parallel_degree": degree,
                "microbatches": setup.microbatches,
                "pipeline": setup.pipeline,
                "ddp": True,
                **placement,
                **setup.options,
            }
        )
    yield
    smp.shutdown()


def place(module: nn.Module, seed: int, degree: int) -> None:
    """Put every unit somewhere, and something everywhere."""
    names = [unit.name for unit in units_of(module).units]
    dice = random.Random(seed)
    owners = [index * degree // len(names) for index in range(len(names))]
    if seed >= 0:
        owners = [dice.randrange(degree) for _ in names]
        for owner, index in enumerate(dice.sample(range(len(names)), min(degree, len(names)))):
            owners[index] = owner
    for name, owner in zip(names, owners, strict=True):
        smp.set_partition(module.get_submodule(name), owner)


def train(case: Case, setup: Setup, degree: int) -> Trace:
    """Train over a pipeline of `degree` ranks, through nothing but the public calls."""
    with world(setup, degree):
        module = build(case)
        if setup.seed is not None:
            place(module, setup.seed, degree)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(optimizer_of([each for each in model.parameters() if each.requires_grad]))
        step = smp.step(case.step)
        outputs = []
        for number, size in enumerate(setup.batches):
            optimizer.zero_grad()
            outputs.append(flat(step(model, *batch(case, number, size, smp.dp_rank()))))
            optimizer.step()
        return trace_of(outputs, model)


def trace_of(outputs: list[Any], model: smp.DistributedModel) -> Trace:
    """Return what this rank holds of `model`, beside what its steps returned."""
    held = {name for name, _ in model.local_named_parameters()}
    return _trace(outputs, model.module, held.__contains__)


def _trace(outputs: list[Any], module: nn.Module, holds: Callable[[str], bool]) -> Trace:
    parameters = {name: each for name, each in module.named_parameters() if holds(name)}
    buffers = {name: each.clone() for name, each in module.named_buffers() if each.device.type != "meta"}
    return Trace(
        outputs,
        {name: None if each.grad is None else each.grad.clone() for name, each in parameters.items()},
        {**{name: each.detach().clone() for name, each in parameters.items()}, **buffers},
    )


def flat(value: Any) -> list[Any]:
    """Return the leaves of what a step returned, and the kinds of containers around them."""
    if isinstance(value, StepOutput):
        return [output.detach() for output in value.outputs]
    inside = children(value)
    if inside is None:
        return [value]
    return [type(value).__name__, *inside, *[leaf for each in inside.values() for leaf in flat(each)]]


def check_same(ours: Trace, plain: Trace, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError where this rank's part differs from the plain run."""
    for number, (mine, theirs) in enumerate(zip(ours.outputs, plain.outputs, strict=True)):
        assert len(mine) == len(theirs), f"step {number} returned {mine}, not {theirs}"
        for left, right in zip(mine, theirs, strict=True):
            _check_close(f"a result of step {number}", left, right, tolerance)
    for name, gradient in ours.gradients.items():
        _check_close(f"the gradient of {name}", gradient, plain.gradients[name], tolerance)
    for name, value in ours.values.items():
        _check_close(name, value, plain.values[name], tolerance)


def _check_close(what: str, ours: Any, plain: Any, tolerance: float) -> None:
    if isinstance(plain, Tensor | float) and isinstance(ours, Tensor | float):
        assert type(ours) is type(plain), f"{what} is {type(ours)}"
        if isinstance(ours, Tensor) and isinstance(plain, Tensor) and ours.device != plain.device:
            ours, tolerance = ours.to(plain.device), at_least(tolerance)
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")
    else:
        assert ours == plain, f"{what}: {ours} instead of {plain}"


def compare(case: Case, setup: Setup, degree: int) -> set[str]:
    """Train both ways on this rank, compare, and return the names of the parameters that it holds."""
    replica = int(os.environ["RANK"]) // degree
    plain = _plainly(case, setup.microbatches, setup.batches, setup.replicas, replica)
    ours = train(case, setup, degree)
    check_same(ours, plain)
    return set(ours.gradients)


@functools.lru_cache(8)
def _plainly(case: Case, microbatches: int, batches: tuple[int, ...], replicas: int, replica: int) -> Trace:
    """Train plainly, once for all the schedules and placements that must come to the same."""
    return train_plainly(case, Setup(microbatches, batches=batches, replicas=replicas), replica)


def run_all(cases: dict[str, Case], setups: Sequence[Setup], degree: int) -> dict[str, list[set[str]]]:
    """Compare every case in every setup; an error names the case, and ends the world."""
    return {name: [_told(name, case, setup, degree) for setup in setups] for name, case in cases.items()}


def _told(name: str, case: Case, setup: Setup, degree: int) -> set[str]:
    try:
        return compare(case, setup, degree)
    except BaseException as error:
        raise AssertionError(f"`{name}` at degree {degree} with {setup}") from error


def train_with_sleeps(case: Case, setup: Setup, seeds: Sequence[int], degree: int) -> int:
    """Train while sends, receives and layers sleep at random, each rank by dice of its own; compare for every seed."""
    plain = {name: getattr(Transport, name) for name in ("send", "send_gradient", "receive", "receive_gradient")}
    linear = nn.Linear.forward
    expected = train_plainly(case, setup)
    for seed in seeds:
        dice = random.Random(f"{seed} {os.environ['RANK']}")
        for name, function in plain.items():
            setattr(Transport, name, _sleepy(function, dice))
        nn.Linear.forward = _sleepy(linear, dice)  # type: ignore[method-assign]
        try:
            check_same(train(case, setup, degree), expected)
        finally:
            nn.Linear.forward = linear  # type: ignore[method-assign]
            for name, function in plain.items():
                setattr(Transport, name, function)
    return len(seeds)


def _sleepy(function: Any, dice: random.Random) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        if dice.random() < 0.3:
            time.sleep(dice.random() * 0.004)
        return function(*args, **kwargs)

    return called
