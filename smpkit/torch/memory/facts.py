"""What was measured of steps, and what it makes of each choice: pure functions of numbers that all ranks agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from smpkit.plan.offload.simulate import Rules
from smpkit.plan.offload.work import LinkSpeed
from smpkit.plan.tune.chain import ChainChoice, ChainLayer, ChainLimits, Choice, choose, smallest_bytes
from smpkit.plan.tune.simulated import LoneEngine, choose_by_simulation

__all__ = ["Chosen", "StepFacts", "engine_rules", "gib"]


@dataclass(frozen=True)
class StepFacts:
    """What was measured of a step, and of where it ran; layers are those of one microbatch."""

    names: tuple[str, ...]
    layers: tuple[ChainLayer, ...]
    first_bytes: int
    """Of the inputs of the first layer: as much larger as they become, so does all that depends on the batch."""
    static_bytes: int
    """Of weights, gradients and states, whatever the batch."""
    dynamic_bytes: float
    """What the model computes outside its layers."""
    busy_seconds: float
    """A step with every layer holding as little as it can, without what it waited for copies."""
    stall_seconds: float
    """What it waited."""
    microbatches: int
    live: float
    """Microbatches that are held at a time."""
    limit_bytes: float
    host_bytes: float
    link: LinkSpeed
    window_layers: int
    allowed: frozenset[Choice]
    overlaps: bool
    """Whether forwards of some microbatches run between backwards of others."""
    engine: LoneEngine

    @property
    def limits(self) -> ChainLimits:
        """What there is for the layers."""
        room = max(0.0, self.limit_bytes - self.static_bytes - self.dynamic_bytes)
        return ChainLimits(
            self.live, room, self.host_bytes, self.link, self.window_layers, self.allowed, overlaps=self.overlaps
        )

    @property
    def other_bytes(self) -> float:
        """What everything but the layers takes on the device."""
        return self.static_bytes + self.dynamic_bytes

    def scaled(self, factor: float) -> StepFacts:
        """Return the facts of a batch that is so much larger."""
        layers = tuple(
            replace(
                each,
                forward_seconds=each.forward_seconds * factor,
                backward_seconds=each.backward_seconds * factor,
                recompute_seconds=each.again_seconds * factor,
                saved_bytes=math.ceil(each.saved_bytes * factor),
                input_bytes=math.ceil(each.input_bytes * factor),
            )
            for each in self.layers
        )
        return replace(
            self,
            layers=layers,
            dynamic_bytes=self.dynamic_bytes * factor,
            busy_seconds=self.busy_seconds * factor,
            stall_seconds=self.stall_seconds * factor,
        )

    def step_seconds(self, chosen: Chosen) -> float:
        """Return what a step takes as chosen: the measured one, with other layers recomputed and other waits."""
        measured = sum(each.forward_seconds + each.backward_seconds + each.again_seconds for each in self.layers)
        return self.busy_seconds + self.microbatches * (chosen.pick.cost.seconds - measured)

    @property
    def kept_seconds(self) -> float:
        """What a step takes if every layer keeps all that autograd saves: nothing is recomputed or copied."""
        return self.busy_seconds - self.microbatches * sum(each.again_seconds for each in self.layers)

    @property
    def _is_simulated(self) -> bool:
        """Whether the order of all forwards and backwards is known: that of one microbatch after the other."""
        return not self.overlaps and self.live == 1

    def choose(self) -> Chosen:
        """Return the best choice that fits, or the smallest there is."""
        limits = self.limits
        pick = self._pick(limits)
        if pick is not None:
            return Chosen(pick, limits)
        least = smallest_bytes(self.layers, limits)
        pick = self._pick(replace(limits, device_bytes=least))
        assert pick is not None, "the smallest choice fits into what it takes"
        problem = (
            f"the model does not fit: its layers hold at least {gib(least)}, the rest takes {gib(self.other_bytes)}, "
            f"and the device may hold {gib(self.limit_bytes)}; every layer holds as little as it can "
            "(use smaller batches, or shard states with more ranks)"
        )
        return Chosen(pick, limits, problem)

    def _pick(self, limits: ChainLimits) -> ChainChoice | None:
        if self._is_simulated:
            return choose_by_simulation(self.layers, limits, self.engine)
        return choose(self.layers, limits)


@dataclass(frozen=True)
class Chosen:
    """A choice for the layers."""

    pick: ChainChoice
    limits: ChainLimits
    problem: str | None = None
    """Why nothing fits, in words."""


def engine_rules(*, runs_ahead: bool) -> Rules:
    """Return how the engine works on a link, for the simulator."""
    return Rules(is_planned=False, ring=2 if runs_ahead else None)


def gib(num_bytes: float) -> str:
    """Return a size in words."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.2f} MiB"
