"""Whatever is kept of the shapes of data stays bounded: no container of the runtime grows with their number."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import and_, or_
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import pytest

from smpkit.torch.core import tensor_spec
from smpkit.torch.offload import report
from smpkit.torch.pipeline import executor
from tests.models import CASES, Case
from tests.ranks import run_ranks
from tests.train import KINDS, Training, TrainingInSlices, batch, training

CONTAINERS = (dict, list, set, frozenset, tuple, deque, WeakKeyDictionary, WeakSet, WeakValueDictionary)
BOUND = 6
"""In place of the bounds of caches, so that steps are few."""


BY_MEMORY = {"Arena", "Block", "_Range"}
"""Blocks of host memory: there are no more than the arena has room for (tests/torch/offload/test_arena.py)."""


def sizes() -> Counter[str]:
    """Return how much all modules, classes and objects of smpkit hold, by class and attribute.

    Caches of functions have their own bounds, and are emptied.
    """
    for cache in caches():
        cache.cache_clear()
    gc.collect()
    found: Counter[str] = Counter()
    for owner in [*gc.get_objects()]:
        named = isinstance(owner, ModuleType | type)
        name = owner.__name__ if named else type(owner).__qualname__
        module = name if isinstance(owner, ModuleType) else (owner if named else type(owner)).__module__
        if str(module).partition(".")[0] != "smpkit" or name in BY_MEMORY:
            continue
        found[name] += 1
        for attribute, value in attributes(owner):
            found[f"{name}.{attribute}"] += held(value)
    return found


def attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(owner, "__dict__", {}).items())
    if not isinstance(owner, ModuleType | type):
        for each in type(owner).__mro__:
            for name in getattr(each, "__slots__", ()):
                if hasattr(owner, name):
                    yield name, getattr(owner, name)


def held(value: Any, depth: int = 4) -> int:
    """Return the entries of a container, with those of containers inside."""
    if not isinstance(value, CONTAINERS) or not depth:
        return 0
    inside = [*value.values()] if isinstance(value, Mapping) else [*value]
    return len(inside) + sum(held(each, depth - 1) for each in inside)


def lower_bounds() -> None:
    executor.MAX_KINDS = BOUND  # type: ignore[misc]
    executor.MAX_OUTPUT_SPECS = 8 * BOUND  # type: ignore[misc]
    tensor_spec.MAX_INTERNED = BOUND  # type: ignore[misc]
    report._STEPS_KEPT = BOUND  # type: ignore[misc]


def train_many(trained: Training | TrainingInSlices, case: Case, count: int) -> dict[str, tuple[int, int]]:
    """Train with a batch of another size in each step; return what grew in the second half."""
    seen = []
    for number in range(count):
        trained.step(*batch(case, number, 8 * (count - number)))  # the largest first: memory for it stays
        if (number + 1) % (count // 2) > count // 2 - 4 or (number + 1) % (count // 2) == 0:
            seen.append(sizes())
    trained.step(*batch(case, 0, 8 * count))  # whose plan has been forgotten, on all ranks alike
    # What a step has just begun or not yet let go is no growth.
    half = len(seen) // 2
    early, late = reduce(or_, seen[:half]), reduce(and_, seen[half:])
    return {name: (early[name], late[name]) for name in late if late[name] > early[name] + 2}


def train_kind(name: str, count: int) -> dict[str, tuple[int, int]]:
    lower_bounds()
    if name not in KINDS:
        case = CASES["Sequential"]
        return train_many(TrainingInSlices(case, num_slices=4, checkpoint_activation=True), case, count)
    case, way = KINDS[name]
    with training(case, way) as trained:
        return train_many(trained, case, count)


NAMES = ("pipeline", "tensor", "data, sharded state", "activations offloaded", "an OffloadModel")
MANY = (pytest.mark.slow, pytest.mark.timeout(700))


@pytest.mark.parametrize(
    ("name", "count"),
    [*[(name, 20) for name in NAMES], *[pytest.param(name, 1000, marks=MANY) for name in (*NAMES, "interleaved")]],
)
def test_nothing_grows_with_the_number_of_shapes(name: str, count: int) -> None:
    ranks = KINDS[name][1].ranks if name in KINDS else 1
    assert run_ranks(train_kind, ranks, name, count, timeout=600) == [{}] * ranks


def caches() -> list[Any]:
    """Return the functions of the runtime with caches."""
    modules = [module for name, module in sys.modules.items() if name.startswith("smpkit.torch.")]
    return [value for module in modules for value in vars(module).values() if hasattr(value, "cache_parameters")]


def test_caches_of_functions_have_a_bound() -> None:
    importlib.import_module("smpkit.torch.offload_model")
    importlib.import_module("smpkit.torch.tensor_parallel.loss")
    asked = [each for each in caches() if inspect.signature(each).parameters]
    assert len(asked) > 4
    unbounded = {each.__name__ for each in asked if each.cache_parameters()["maxsize"] is None}
    assert unbounded <= {"_lazy_class"}  # one for each class of outputs
