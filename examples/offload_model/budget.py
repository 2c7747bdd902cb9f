"""What fits the device: as few slices as the plan allows."""

from __future__ import annotations

from dataclasses import replace

from model import BYTES

from smpkit.plan.offload.model import OffloadedModel, device_peak_bytes

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
