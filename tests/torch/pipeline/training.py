"""Train a case plainly and over a pipeline, and compare everything that came out."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smpkit.torch as smp
from smpkit.torch.containers import children
from smpkit.torch.partitioning.trace import units_of
from smpkit.torch.step_output import StepOutput, collate
from tests.transparency.pipeline_models import Case

TOLERANCE = 1e-11  # float64; what differs is the order in which microbatches, users and ranks are added up


@dataclass(frozen=True)
class Setup:
    """How to train.

    Args:
        microbatches: how many per step.
        pipeline: `interleaved` or `simple`.
        seed: of the placement: None lets smpkit decide, -1 deals the units out evenly.
        batches: the batch size of each step.
        options: further configuration.
    """

    microbatches: int = 4
    pipeline: str = "interleaved"
    seed: int | None = None
    batches: tuple[int, ...] = (8, 8, 8)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """What training did: what each step returned, and the last gradients, weights and buffers of this rank."""

    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    values: dict[str, Tensor]


class Plain(nn.Module):
    """What a step function sees of a model, in one process."""

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        super().__init__()
        self.module = module
        self.microbatches = microbatches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [torch.ones_like(root) for root in roots] if gradients is None else gradients
        torch.autograd.backward(roots, [each / self.microbatches for each in given])


def build(case: Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return case.build().to(dtype)


def batch(case: Case, number: int, size: int) -> tuple[Any, ...]:
    return case.batch(size, torch.Generator().manual_seed(100 + number))


def part(value: Any, index: int, count: int) -> Any:
    return value.chunk(count)[index] if isinstance(value, Tensor) else value


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    # Not Adam: it turns rounding errors of gradients that are 0 in theory into steps of full size.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_plainly(case: Case, setup: Setup) -> Trace:
    """Train in one process, microbatch after microbatch."""
    model = Plain(build(case), setup.microbatches)
    optimizer = optimizer_of([each for each in model.parameters() if each.requires_grad])
    outputs = []
    for number, size in enumerate(setup.batches):
        optimizer.zero_grad()
        whole = batch(case, number, size)
        parts = [[part(each, index, setup.microbatches) for each in whole] for index in range(setup.microbatches)]
        outputs.append(flat(collate([case.step(model, *arguments) for arguments in parts])))
        optimizer.step()
    return _trace(outputs, model.module, lambda _: True)


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
    homes = [index * degree // len(names) for index in range(len(names))]
    if seed >= 0:
        homes = [dice.randrange(degree) for _ in names]
        for home, index in enumerate(dice.sample(range(len(names)), min(degree, len(names)))):
            homes[index] = home
    for name, home in zip(names, homes, strict=True):
        smp.set_partition(module.get_submodule(name), home)


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
            outputs.append(flat(step(model, *batch(case, number, size))))
            optimizer.step()
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
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")
    else:
        assert ours == plain, f"{what}: {ours} instead of {plain}"


def compare(case: Case, setup: Setup, degree: int) -> set[str]:
    """Train both ways on this rank, compare, and return the names of the parameters that it holds."""
    plain = train_plainly(case, setup)
    ours = train(case, setup, degree)
    check_same(ours, plain)
    return set(ours.gradients)


def run_all(cases: dict[str, Case], setups: Sequence[Setup], degree: int) -> dict[str, list[set[str]]]:
    """Compare every case in every setup; an error names the case, and ends the world."""
    return {name: [_told(name, case, setup, degree) for setup in setups] for name, case in cases.items()}


def _told(name: str, case: Case, setup: Setup, degree: int) -> set[str]:
    try:
        return compare(case, setup, degree)
    except BaseException as error:
        raise AssertionError(f"`{name}` at degree {degree} with {setup}") from error
