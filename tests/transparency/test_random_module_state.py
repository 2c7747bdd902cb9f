"""Recomputation finds what modules read and change as it was: random modules, against plain PyTorch, to the bit.

Each seed builds a chain of parts out of habits that real models have: buffers that forward changes, replaces, sets to
None or registers late, counters, lists, masks that the caller puts on the module, generators, norms, writes to weights.
All of them make the output depend on how often and in which order a part has run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import smpkit.torch as smp
from smpkit import OffloadModel
from smpkit.testing import EmulatedLink

WIDTH: Final = 3
ROWS: Final = 4
HABITS: Final = (
    *("total", "mean", "memory", "late", "calls", "log", "stats", "generator", "mask", "steps", "ema", "own norm"),
    *("batch norm", "cumulative norm", "silent norm", "instance norm", "spectral norm", "dropout", "rarely", "clamp"),
    *("even", "shared", "in place", "turns"),
)
NORMS: Final = frozenset({"batch norm", "cumulative norm", "silent norm", "instance norm"})
ONE_MICROBATCH: Final = frozenset({"dropout", "clamp", "spectral norm"})
"""With several, an OffloadModel's slices draw in another order; plain PyTorch refuses a backward after another forward
has written to weights; and more than two gradients are added up in another order."""


class Part(nn.Module):
    """A linear layer with habits."""

    total: Tensor
    mean: Tensor
    memory: Tensor | None
    late: Tensor
    ema: Tensor
    own_mean: Tensor
    own_var: Tensor
    rare: Tensor

    def __init__(self, habits: list[str], seed: int) -> None:
        super().__init__()
        self.habits = habits
        linear = nn.Linear(WIDTH, WIDTH)
        self.linear = spectral_norm(linear) if "spectral norm" in habits else linear
        for name in ("total", "mean", "ema", "own_mean", "rare"):
            self.register_buffer(name, torch.zeros(WIDTH))
        self.register_buffer("own_var", torch.ones(WIDTH))
        self.register_buffer("memory", None)
        self.norm: nn.Module = nn.Identity()
        for name, momentum in (("batch norm", 0.1), ("cumulative norm", None), ("silent norm", 0.0)):
            if name in habits:
                self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        if "instance norm" in habits:
            self.norm = nn.InstanceNorm1d(ROWS, track_running_stats=True, affine=False)
        self.drop = nn.Dropout(0.4)
        self.turning = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)] if "turns" in habits else [])
        self.calls = 0
        self.even = False
        self.log: list[Any] = []
        self.alias = self.log
        self.stats: dict[str, Any] = {"n": torch.zeros((), dtype=torch.float64), "seen": (1, [2])}
        self.steps = torch.zeros((), dtype=torch.float64)
        self.mask: Tensor | None = None
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        if "in place" in self.habits:
            x = x * 1.0
            x.mul_(1.1)
        if "clamp" in self.habits:
            with torch.no_grad():
                self.linear.get_parameter("weight").clamp_(-0.4, 0.4).mul_(0.99)
        x = self.linear(x)
        for habit in self.habits:
            x = getattr(self, "_" + habit.replace(" ", "_"), lambda value: value)(x)
        return x.tanh() + 0.1

    def _total(self, x: Tensor) -> Tensor:
        self.total.add_(x.detach().mean(0))
        return x * (1 + 0.1 * self.total)

    def _mean(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

    def _memory(self, x: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = x.detach().mean(0)
            return x
        x, self.memory = x + self.memory, None
        return x

    def _late(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", x.detach().mean(0))
            return 2 * x
        self.late.mul_(0.5)
        return x + self.late * 1.0

    def _calls(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)

    def _log(self, x: Tensor) -> Tensor:
        self.log.append(x.detach().sum())
        x = x * (1 + 0.1 * len(self.alias) + 0.01 * self.log[0])
        if len(self.log) > 3:
            self.log.clear()
        return x

    def _stats(self, x: Tensor) -> Tensor:
        self.stats["n"] += 1
        self.stats["seen"][1][0] += 1
        return x * (1 + 0.1 * self.stats["n"] + 0.1 * self.stats["seen"][1][0])

    def _steps(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x / (1.0 * self.steps)

    def _generator(self, x: Tensor) -> Tensor:
        return x * torch.rand(WIDTH, generator=self.generator, dtype=x.dtype)

    def _mask(self, x: Tensor) -> Tensor:
        return x if self.mask is None else x * self.mask

    def _ema(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema.data.mul_(0.9).add_(x.detach().mean(0))  # leaves the version alone
        return x - self.ema

    def _own_norm(self, x: Tensor) -> Tensor:
        x = functional.batch_norm(x, self.own_mean, self.own_var, training=self.training, momentum=0.2)
        return x + self.own_mean

    def _rarely(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1.0:
            self.rare.add_(1)
        return x * (1 + 0.1 * self.rare)

    def _normed(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x)
        return result

    _batch_norm = _cumulative_norm = _silent_norm = _normed

    def _instance_norm(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, ROWS - len(x)))
        normed: Tensor = self.norm(padded[None])
        return normed[0][: len(x)]

    def _dropout(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(x)
        return result

    def _even(self, x: Tensor) -> Tensor:
        self.even = not self.even
        return -x if self.even else x

    def _turns(self, x: Tensor) -> Tensor:
        first, second = self.turning
        self.turning[0], self.turning[1] = second, first
        result: Tensor = x + first(x)
        return result

    def _shared(self, x: Tensor) -> Tensor:
        self.alias.append(1)
        return x * (1 + 0.1 * len(self.log))


Call = Callable[[Tensor], Tensor]
Way = Callable[["Script"], Call]


class Script:
    """What one seed trains, and how: the same for each way to run it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.num_microbatches = self.random.choice([1, 1, 2])
        usable = [habit for habit in HABITS if self.num_microbatches == 1 or habit not in ONE_MICROBATCH]
        self.parts = []
        for number in range(self.random.randint(1, 3)):
            habits = self.random.sample(usable, self.random.randint(1, 4))
            norms = [habit for habit in habits if habit in NORMS]  # one at most: they share `Part.norm`
            habits = [habit for habit in habits if habit not in norms[1:]]
            if "spectral norm" in habits and "clamp" in habits:  # the weight is computed anew in each forward
                habits.remove("clamp")
            self.parts.append(Part(habits, seed + number).double())
        habits_of_all = {habit for part in self.parts for habit in part.habits}
        # Plain PyTorch refuses backward after another forward has written to weights.
        self.num_forwards = (
            1 if "clamp" in habits_of_all or self.num_microbatches > 1 else self.random.choice([1, 2, 3])
        )
        self.num_slices = self.random.randint(1, 3)
        self.frozen_norms = self.random.random() < 0.3
        self.strategy = self.random.choice(["each", "contiguous", "group_2"])

    def train(self, call: Call) -> list[Any]:
        """Train for some steps; return everything that can be compared."""
        found: list[Any] = []
        parameters = [each for part in self.parts for each in part.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        for step in range(3):
            self._switch(step)
            losses, inputs = [], []
            for _ in range(self.num_forwards):
                for part in self.parts:
                    part.mask = torch.rand(WIDTH, dtype=torch.float64) if self.random.random() < 0.5 else None
                x = torch.randn(ROWS, WIDTH, dtype=torch.float64).requires_grad_()
                losses.append(call(x).square().mean())
                inputs.append(x)
            found.append([loss.detach().clone() for loss in losses])
            self._tamper()
            if self.random.random() < 0.5:
                losses.reverse()
            for loss in losses:
                loss.backward()
            self._mend()
            found.append([x.grad for x in inputs] + [each.grad for each in parameters])
            optimizer.step()
            optimizer.zero_grad()
            found.append([state_of(part) for part in self.parts])
            found.append(torch.get_rng_state())
        return found

    def _switch(self, step: int) -> None:
        for part in self.parts:
            part.train(self.random.random() < 0.8 or step == 2)
            if self.frozen_norms:
                part.norm.train(step > 0)
            if self.random.random() < 0.2 and isinstance(part.norm, nn.BatchNorm1d):
                part.norm.momentum = self.random.choice([0.0, 0.3])
            part.drop.p = self.random.choice([0.2, 0.6])

    def _tamper(self) -> None:
        """Change between forward and backward what must not reach backward."""
        self._before = [(part.training, part.norm.training) for part in self.parts]
        for part in self.parts:
            if self.random.random() < 0.5:
                part.mask, part.calls = torch.ones(WIDTH, dtype=torch.float64), part.calls + 1
                part.drop.p = 0.9
            if self.random.random() < 0.3:
                part.eval()

    def _mend(self) -> None:
        for part, (training, normed) in zip(self.parts, self._before, strict=True):
            part.train(training)
            part.norm.train(normed)


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return everything on a module that can differ."""
    found: dict[str, Any] = {}
    for prefix, each in module.named_modules():
        content = {**each._buffers, **each._parameters}
        content |= {name: value for name, value in vars(each).items() if not name.startswith("_")}
        found |= {f"{prefix}.{name}": snapshot(value) for name, value in content.items()}
    return found


def snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, list | tuple):
        return [snapshot(each) for each in value]
    return {key: snapshot(each) for key, each in value.items()} if isinstance(value, dict) else value


def difference(left: Any, right: Any, path: str = "") -> str | None:
    """Return where two results differ first."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return None if torch.equal(left, right) else f"{path}: {left} != {right}"
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return f"{path}: {left.keys() ^ right.keys()}"
        return next(filter(None, (difference(left[key], right[key], f"{path}/{key}") for key in left)), None)
    return None if type(left) is type(right) and left == right else f"{path}: {left!r} != {right!r}"


def plainly(script: Script) -> Call:
    model = nn.Sequential(*script.parts)
    return lambda x: torch.cat([model(part) for part in x.tensor_split(script.num_microbatches)])


def by_call(script: Script) -> Call:
    def run(x: Tensor) -> Tensor:
        for part in script.parts:
            x = smp.checkpoint(part, x)
        return x

    return lambda x: torch.cat([run(part) for part in x.tensor_split(script.num_microbatches)])


def by_setting(script: Script) -> Call:
    model = nn.Sequential(*script.parts)
    smp.set_activation_checkpointing(model, strategy=script.strategy)
    return lambda x: torch.cat([model(part) for part in x.tensor_split(script.num_microbatches)])


def offloaded(checkpoint: bool, on_device: bool) -> Way:
    def way(script: Script) -> Call:
        links = (EmulatedLink(), EmulatedLink()) if on_device else None
        return OffloadModel(
            nn.Sequential(*script.parts),
            "cpu",
            num_slices=script.num_slices,
            checkpoint_activation=checkpoint,
            num_microbatches=script.num_microbatches,
            links=links,
        )

    return way


WAYS: Final[dict[str, Way]] = {
    "smp.checkpoint": by_call,
    "set_activation_checkpointing": by_setting,
    "OffloadModel": offloaded(checkpoint=False, on_device=False),
    "OffloadModel, on a device": offloaded(checkpoint=False, on_device=True),
    "OffloadModel, checkpointed": offloaded(checkpoint=True, on_device=False),
    "OffloadModel, checkpointed, on a device": offloaded(checkpoint=True, on_device=True),
}


def check(seed: int) -> None:
    script = Script(seed)
    described = [part.habits for part in script.parts]
    expected = script.train(plainly(script))
    for name, way in WAYS.items():
        script = Script(seed)
        different = difference(script.train(way(script)), expected)
        assert different is None, f"seed {seed}, {name}, {described}, {vars(script)}: {different}"


@pytest.mark.parametrize("start", range(0, 100, 10))
def test_random_modules_train_as_without_recomputation(start: int) -> None:
    for seed in range(start, start + 10):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 2000, 100))
def test_many_random_modules(start: int) -> None:
    for seed in range(start, start + 100):
        check(seed)
