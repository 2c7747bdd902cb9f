"""Which unit is on which pipeline rank: what is logged, printed before a job and saved with checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Final

from pydantic import TypeAdapter

from smpkit.errors import ConfigError, Problem


@dataclass(frozen=True)
class UnitCost:
    """What a unit costs, with the operations of the model between it and the next unit, which run on the same rank.

    Only ratios matter, so compute may be FLOPs or measured seconds.
    """

    name: str
    parameters_bytes: int = 0
    activation_bytes: int = 0
    """What one microbatch keeps for its backward."""
    flops: float = 0.0
    """Of one microbatch's forward."""
    output_bytes: int = 0
    """What it hands to the next unit."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes, contained in `parameters_bytes`, of the parameters that other units hold too, by key."""
    boundary_bytes: int = 0
    """The part of `activation_bytes` that is inputs of checkpointed layers, which can be offloaded."""
    recomputed_bytes: int = 0
    """What the largest recomputation of a checkpointed layer holds at most, beside its input."""
    recomputed_flops: float = 0.0
    """The part of `flops` that the backward computes again."""
    operations: int = 0
    """How many operators a microbatch's forward calls; each costs the host some time, however little it computes."""
    moved_bytes: int = 0
    """What those of them read and write that compute no products, and so wait for memory."""
    spared_bytes: int = 0
    """What its checkpointed calls would keep for their backward if they were not checkpointed; 0: not known."""
    working_bytes: int = 0
    """What its forward holds at most of what it makes, up to the last tensor that it saves: what recomputing all of it
    would hold; 0: not known."""
    postponed_bytes: int = 0
    """What a backward in two halves keeps from the first to the second: gradients of products with weights."""
    weight_products: int = 0
    """How many those are: for each of them the second half starts anew."""
    unsaved_input_bytes: int = 0
    """What of its differentiable inputs is not in `activation_bytes`: nothing saves it, or a unit before has. A rank
    that receives them from another one keeps them nevertheless, until it has their gradients."""

    @property
    def recomputed_share(self) -> float:
        """Which part of the forward the backward runs again."""
        return self.recomputed_flops / self.flops if self.flops else 0.0

    @property
    def step_flops(self) -> float:
        """Compute of forward, backward (worth two forwards) and recomputation, as forwards of a plain unit."""
        return self.flops + self.recomputed_flops / 3


BYTES_PER_MICROBATCH: Final = (
    "activation_bytes",
    "output_bytes",
    "boundary_bytes",
    "recomputed_bytes",
    "moved_bytes",
    "spared_bytes",
    "working_bytes",
    "postponed_bytes",
    "unsaved_input_bytes",
)
"""The fields of a `UnitCost` that are bytes which depend on the size of a microbatch."""
PER_MICROBATCH: Final = (*BYTES_PER_MICROBATCH, "flops", "recomputed_flops")
"""All that depend on it."""


@dataclass(frozen=True)
class Assignment:
    """Which partition (pp_rank) every unit is on."""

    num_partitions: int
    units: tuple[tuple[str, int], ...]
    """Name and partition, in execution order."""
    activation_bytes: tuple[int, ...]
    """By partition, what one microbatch keeps there for its backward."""
    step_flops: tuple[float, ...]
    """By partition, the compute of its units."""

    @cached_property
    def partition_of(self) -> dict[str, int]:
        """The partition of each unit, by name."""
        return dict(self.units)

    def names(self, partition: int) -> tuple[str, ...]:
        """Return the units of a partition, in execution order."""
        return tuple(name for name, place in self.units if place == partition)

    @property
    def compute_imbalance(self) -> float:
        """The compute of the busiest partition over the mean, 1 or more; it bounds the speed."""
        total = sum(self.step_flops)
        return max(self.step_flops) * self.num_partitions / total if total else 1.0

    def log_lines(self) -> list[str]:
        """Return SMP v1's heading and a line for every unit, as they are logged."""
        return ["Partition assignments:", *(f"  {name}: {place}" for name, place in self.units)]

    def to_json(self) -> str:
        """Write it as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Read what `to_json` wrote; raise ConfigError if it is not that."""
        try:
            read = TypeAdapter(cls).validate_json(text)
            count = read.num_partitions
            sizes = {len(read.activation_bytes), len(read.step_flops)}
            if any(not 0 <= place < count for _, place in read.units) or sizes != {count}:
                raise ValueError(f"units or sums that do not fit {count} partitions")
        except ValueError as error:
            problem = Problem((), f"not a partition assignment: {type(error).__name__}: {error}")
            raise ConfigError([problem], subject="partition assignment") from None
        return read


def assignment_of(units: Sequence[UnitCost], places: Mapping[int, int], num_partitions: int) -> Assignment:
    """Return the assignment in which the unit of index `i` is on partition `places[i]`."""
    named = tuple((unit.name, places[index]) for index, unit in enumerate(units))
    parts: list[list[UnitCost]] = [[] for _ in range(num_partitions)]
    for index, unit in enumerate(units):
        parts[places[index]].append(unit)
    activation_bytes = tuple(sum(unit.activation_bytes for unit in part) for part in parts)
    return Assignment(
        num_partitions, named, activation_bytes, tuple(sum(unit.step_flops for unit in part) for part in parts)
    )
