"""What the parts of a model cost, measured: how long each unit's forward takes, and what it leaves allocated.

The step runs for one microbatch with real data on one rank, which holds the whole model meanwhile. It runs a few times,
because the first run is slow for other reasons; backward is taken to cost the same multiple of forward everywhere.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smpkit.plan.partition.assignment import UnitCost
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import map_tensors, storage_of
from smpkit.torch.placement.trace import TrialStep, restoring_model

__all__ = ["MeasureOptions", "measure"]

_RUNS: Final = 4  # the first run warms up; of the others the fastest counts, which was disturbed least


@dataclass(frozen=True)
class MeasureOptions:
    """What of a model to measure: arguments of `smp.DistributedModel`."""

    times: bool = False
    memory: bool = False

    def __bool__(self) -> bool:
        return self.times or self.memory

    def __str__(self) -> str:
        if self.times and self.memory:
            return "execution times and memory"
        return "execution times" if self.times else "memory"


def measure(
    root: nn.Module, costs: Sequence[UnitCost], what: MeasureOptions, step: TrialStep, device: torch.device
) -> list[UnitCost]:
    """Return `costs` with measured values, in the order in which the units ran; those that did not cost nothing.

    The model is moved to `device` and stays there; apart from that it is as it was.
    """
    root.to(device)
    step = replace(step, **map_tensors(lambda tensor: tensor.to(device), {"args": step.args, "kwargs": step.kwargs}))
    names = [cost.name for cost in costs]
    times = _times(root, names, step, device) if what.times else {}
    memory = _memory(root, names, step) if what.memory else {}
    ran = list(times or memory)
    known = {cost.name: cost for cost in costs}
    measured = [known[name] for name in [*ran, *(name for name in names if name not in ran)]]
    if what.times:
        measured = [replace(cost, flops=times.get(cost.name, 0.0)) for cost in measured]
    if what.memory:
        measured = [replace(cost, activation_bytes=memory.get(cost.name, 0)) for cost in measured]
    return measured


def _times(root: nn.Module, names: Collection[str], step: TrialStep, device: torch.device) -> dict[str, float]:
    """Return the seconds of one microbatch by unit, the least of several runs."""

    def now() -> float:
        devices.wait_for_stream(device)  # kernels run after the call has returned
        return time.perf_counter()

    runs = [_growth_by_unit(root, names, step, now) for _ in range(_RUNS)][1:]
    return {name: min(run.get(name, 0.0) for run in runs) for name in runs[0]}


def _memory(root: nn.Module, names: Collection[str], step: TrialStep) -> dict[str, int]:
    """Return the bytes of one microbatch that are allocated after each unit and were not before, by unit."""
    live = _LiveStorages()
    with live:
        measured = _growth_by_unit(root, names, step, live.num_bytes)
    return {name: max(0, round(num_bytes)) for name, num_bytes in measured.items()}


def _growth_by_unit(
    root: nn.Module, names: Collection[str], step: TrialStep, value: Callable[[], float]
) -> dict[str, float]:
    """Run the step and return by how much `value()` grew during each unit, over all of its calls."""
    growth: dict[str, float] = {}
    value_before: dict[str, float] = {}

    def before_forward(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            value_before[name] = value()

        return hook

    def after_forward(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            growth[name] = growth.get(name, 0.0) + value() - value_before[name]

        return hook

    with contextlib.ExitStack() as stack:
        for name in names:
            module = root.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(before_forward(name)))
            stack.enter_context(module.register_forward_hook(after_forward(name)))
        stack.enter_context(restoring_model(root, torch.clone))
        step()
    return growth


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations have allocated and that are still in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A weak reference keeps the place of a storage, not its memory: no later one can be taken for it.
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            # Results that share memory with an argument are views and changes in place: nothing new.
            if isinstance(each, torch.Tensor) and storage_of(each) not in given:
                storage = each.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        return result

    def num_bytes(self) -> int:
        self._made = {key: pair for key, pair in self._made.items() if not pair[0].expired()}  # type: ignore[no-untyped-call]
        return sum(num_bytes for _, num_bytes in self._made.values())
