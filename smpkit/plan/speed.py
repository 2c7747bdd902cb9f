"""How fast a rank works, as plans need it: from what a unit computes to seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.partition.assignment import UnitCost


@dataclass(frozen=True)
class Speed:
    """What the devices reach, from which seconds are computed."""

    flops_per_second: float
    link: LinkSpeed
    message_latency_seconds: float = 0.0
    """How long an empty message between stages takes."""
    message_seconds_per_byte: float = 0.0
    action_seconds: float = 0.0
    """What the runtime itself adds to each action."""
    collective_seconds: Mapping[str, float] = field(default_factory=dict)
    """By name of a unit, what ranks of a tensor-parallel group spend on collectives in its forward; its backward takes
    as much again."""
    operation_seconds: float = 0.0
    """What the host spends on an operator; 0 where it is contained in the rates."""
    moved_bytes_per_second: float = inf
    """How fast the device reads and writes in operators that compute no products; infinite where that is contained in
    the rates."""
    is_asynchronous: bool = True
    """The host runs ahead of the device: the longer of both counts."""
    split_seconds: float = 0.0
    """How much longer the host takes for a backward in two halves, for each product with a weight."""

    def forward_seconds(self, unit: UnitCost) -> float:
        """Return how long the forward of a unit takes."""
        device, host = self._device_seconds(unit), unit.operations * self.operation_seconds
        return max(device, host) if self.is_asynchronous else device + host

    def seconds_of_split(self, unit: UnitCost) -> float:
        """Return how much longer the backward of a unit takes in two halves than in one."""
        more = unit.weight_products * self.split_seconds
        if not self.is_asynchronous:
            return more
        device, host = 2 * self._device_seconds(unit), 2 * unit.operations * self.operation_seconds
        return max(device, host + more) - max(device, host)

    def _device_seconds(self, unit: UnitCost) -> float:
        return unit.flops / self.flops_per_second + unit.moved_bytes / self.moved_bytes_per_second
