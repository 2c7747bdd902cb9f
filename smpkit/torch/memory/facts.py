"""What was measured of steps, and what it makes of each choice: pure functions of numbers that all ranks agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from smpkit.plan.tune.chain import (
    ChainChoice,
    ChainLayer,
    ChainLimits,
    LoneEngine,
    choose,
    choose_by_simulation,
    smallest_bytes,
)


@dataclass(frozen=True)
class StepFacts:
    """What was measured of a step, and of where it ran; layers are those of one microbatch."""

    names: tuple[str, ...]
    layers: tuple[ChainLayer, ...]
    first_bytes: int
    """The size of the first layer's inputs; all that depends on the batch grows with them."""
    static_bytes: float
    """Weights, gradients and optimizer states, which do not depend on the batch."""
    dynamic_bytes: float
    """The most that the device held beside these and what layers kept: logits, say, or a recomputation."""
    forward_bytes: float
    """The same until the first recomputation; infinite if not every layer is called exactly once in a forward."""
    busy_seconds: float
    """How long a step takes in which layers hold as little as they can, without its waits for copies."""
    stall_seconds: float
    """How long such a step waited for copies."""
    microbatches: int
    limits: ChainLimits
    """What the device has for everything, and what the host has for the layers."""
    engine: LoneEngine

    @property
    def room(self) -> ChainLimits:
        """The limits of what depends on the batch."""
        room = max(0.0, self.limits.device_bytes - self.static_bytes)
        forward = None if self.limits.overlaps or math.isinf(self.forward_bytes) else self.forward_bytes
        return replace(self.limits, device_bytes=room, outside_bytes=self.dynamic_bytes, forward_bytes=forward)

    @property
    def other_bytes(self) -> float:
        """What the device holds beside what layers keep."""
        return self.static_bytes + self.dynamic_bytes

    @property
    def kept_seconds(self) -> float:
        """What a step takes if every layer keeps all that autograd saves: nothing is recomputed or copied."""
        return self.busy_seconds - self.microbatches * sum(layer.again_seconds for layer in self.layers)

    def step_seconds(self, pick: ChainChoice) -> float:
        """Return what a step takes with a choice: what was measured, with other layers recomputed and other waits."""
        measured = sum(layer.forward_seconds + layer.backward_seconds + layer.again_seconds for layer in self.layers)
        return self.busy_seconds + self.microbatches * (pick.cost.seconds - measured)

    def device_bytes(self, pick: ChainChoice) -> float:
        """Return the peak on the device with a choice."""
        return self.static_bytes + pick.cost.device_bytes

    def scaled(self, first_bytes: int) -> StepFacts:
        """Return the facts of a larger batch, by what its first layer is given."""
        factor = first_bytes / self.first_bytes
        layers = tuple(
            replace(
                layer,
                forward_seconds=layer.forward_seconds * factor,
                backward_seconds=layer.backward_seconds * factor,
                recompute_seconds=layer.again_seconds * factor,
                saved_bytes=math.ceil(layer.saved_bytes * factor),
                input_bytes=math.ceil(layer.input_bytes * factor),
            )
            for layer in self.layers
        )
        return replace(
            self,
            layers=layers,
            first_bytes=first_bytes,
            dynamic_bytes=self.dynamic_bytes * factor,
            forward_bytes=self.forward_bytes * factor,
            busy_seconds=self.busy_seconds * factor,
            stall_seconds=self.stall_seconds * factor,
        )

    def choose(self) -> tuple[ChainChoice, str | None]:
        """Return the best choice that fits, or the smallest there is, and a sentence if even that does not fit."""
        room = self.room
        if (pick := self._best(room)) is not None:
            return pick, None
        least = smallest_bytes(self.layers, room)
        pick = self._best(replace(room, device_bytes=least))
        assert pick is not None, "the smallest choice fits into what it takes"
        return pick, (
            f"the model does not fit: its layers hold at least {gib(least - self.dynamic_bytes)}, the rest takes"
            f" {gib(self.other_bytes)}, and the device may hold {gib(self.limits.device_bytes)}; every layer holds as"
            " little as it can (use smaller batches, or shard states with more ranks)"
        )

    def _best(self, room: ChainLimits) -> ChainChoice | None:
        # Of one microbatch after the other the order is known, and can be simulated; else sums must do.
        return choose(self.layers, room) if room.overlaps else choose_by_simulation(self.layers, room, self.engine)


def gib(num_bytes: float) -> str:
    """Return a size in words."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.2f} MiB"
