"""Train over ranks with simulated devices, and compare with training in one process on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tests.device.on_sim import naming
from tests.models import Case
from tests.torch.pipeline.training import Setup, check_same, train, train_plainly

__all__ = ["on_device", "train_all"]

_TOLERANCE = 1e-12  # float64; what differs is the order in which microbatches, users and ranks are added up


def there(build: Callable[[], nn.Module]) -> nn.Module:
    return build().to("sim")


def moved(batch: Callable[..., tuple[Any, ...]], size: int, generator: Any) -> tuple[Any, ...]:
    values = batch(size, generator)
    return tuple(value.to("sim") if isinstance(value, Tensor) else value for value in values)


def on_device(case: Case) -> Case:
    return replace(case, build=functools.partial(there, case.build), batch=functools.partial(moved, case.batch))


def train_all(cases: dict[str, Case], setups: tuple[Setup, ...], stages: int) -> int:
    """Train each case, built on the CPU, over a pipeline, and compare with one that has always been on a device."""
    for name, case in cases.items():
        for setup in setups:
            with naming(f"`{name}` with {setup}"):
                check_same(train(case, setup, stages), train_plainly(on_device(case), setup), _TOLERANCE)
    return len(cases) * len(setups)
