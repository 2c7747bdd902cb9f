"""What fits: slices for the device's memory, layers for the host's, and what this process has really held."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from model import BYTES

from smpkit.plan.offload.model import OffloadedModel, Update, device_peak_bytes, host_peak_bytes

MIB = 2**20


def planned_device_bytes(plan: OffloadedModel) -> float:
    """Return what the plan says of the blocks, and the loss outside the model: scores, their softmax and gradient."""
    return device_peak_bytes(plan) + 3 * plan.num_tokens * BYTES * plan.number_bytes


def choose_slices(planned: OffloadedModel, budget_bytes: float) -> OffloadedModel:
    """Return the plan with the fewest slices that stays within the budget; no layer is cut."""
    for num_slices in range(1, planned.layers + 1):
        largest = -(-planned.layers // num_slices)
        plan = replace(planned, num_slices=num_slices, imbalance=largest * num_slices / planned.layers)
        if planned_device_bytes(plan) <= budget_bytes:
            return plan
    raise SystemExit(f"even one layer at a time needs {planned_device_bytes(plan) / MIB:.1f} MiB; give a larger budget")


def planned_host_bytes(plan: OffloadedModel) -> float:
    """Return what the plan says of the host: weights, gradients, optimizer states and the inputs of slices."""
    return host_peak_bytes(plan, Update.JUST_IN_TIME)


def choose_layers(planned: Callable[[int], OffloadedModel], budget_bytes: float) -> int:
    """Return the most layers with which the host's peak stays within the budget."""
    layers = 1
    while planned_host_bytes(planned(layers + 1)) <= budget_bytes:
        layers += 1
    if planned_host_bytes(planned(layers)) > budget_bytes:
        raise SystemExit("not even one layer fits; give a larger --host-gib, or a smaller --width")
    return layers


def resident_bytes() -> int:
    """Return the most memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux; its `ru_maxrss` begins with what the process held that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
