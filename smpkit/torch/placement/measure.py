"""How long the forward of each unit takes, measured: another measure of what a unit computes.

The step runs for one microbatch with real data on one rank, which holds the whole model meanwhile. It runs a few times,
because the first run is slow for other reasons; backward is taken to cost the same multiple of forward everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from smpkit.plan.partition.assignment import UnitCost
from smpkit.torch.core import devices
from smpkit.torch.core.tensor_spec import map_tensors
from smpkit.torch.placement.trace import TrialStep, restoring_model

_RUNS: Final = 4  # the first run warms up; of the others the fastest counts, which was disturbed least


def measure_times(root: nn.Module, costs: Sequence[UnitCost], step: TrialStep, device: torch.device) -> list[UnitCost]:
    """Return `costs` with seconds for operations, in the order in which the units ran; those that did not cost none.

    The model is moved to `device` and stays there; apart from that it is as it was.
    """
    root.to(device)
    step = replace(step, **map_tensors(lambda tensor: tensor.to(device), {"args": step.args, "kwargs": step.kwargs}))
    known = {cost.name: cost for cost in costs}
    _, *runs = [_seconds_by_unit(root, known, step, device) for _ in range(_RUNS)]
    seconds = {name: min(run.get(name, 0.0) for run in runs) for name in runs[0]}
    in_order = [*seconds, *(name for name in known if name not in seconds)]
    return [replace(known[name], flops=seconds.get(name, 0.0)) for name in in_order]


def _seconds_by_unit(
    root: nn.Module, names: Collection[str], step: TrialStep, device: torch.device
) -> dict[str, float]:
    """Run the step and return how long each unit took, over all of its calls."""
    taken: dict[str, float] = {}
    started: dict[str, float] = {}

    def now() -> float:
        devices.wait_for_stream(device)  # kernels run after the call has returned
        return time.perf_counter()

    def begin(name: str, *_: Any) -> None:
        started[name] = now()

    def end(name: str, *_: Any) -> None:
        taken[name] = taken.get(name, 0.0) + now() - started[name]

    with contextlib.ExitStack() as stack:
        for name in names:
            module = root.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(functools.partial(begin, name)))
            stack.enter_context(module.register_forward_hook(functools.partial(end, name)))
        stack.enter_context(restoring_model(root, _buffer_of_its_own))
        step()
    return taken


def _buffer_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
