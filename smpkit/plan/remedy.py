"""The sentence for a rank that ran out of memory: the one setting that would save it most, by what it held.

`smpkit plan --model` weighs the same changes by the simulated schedule, before anything runs
(`smpkit.plan.tune.features`). When a rank has died, its launcher has the figures of the rank's status page instead, and
asks for this sentence once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.tune.neighbours import memory_changes
from smpkit.units import amount


@dataclass(frozen=True)
class Levers:
    """What a job could still switch on to save memory.

    Args:
        replicas: ranks that hold the same weights.
        settings: how a user would write each feature, by the feature's name.
    """

    replicas: int
    settings: Mapping[str, str]

    @classmethod
    def of(cls, config: ModelParallelConfig, replicas: int, *, is_checkpointed: bool) -> Levers:
        """Return what a configuration has not set."""
        changes = memory_changes(config, replicas, can_checkpoint=True, is_checkpointed=is_checkpointed)
        return cls(replicas, {change.feature: change.setting for change in changes if not change.is_on})


def memory_hint(levers: Levers, asked: int, *, weights: int, gradients: int, states: int, activations: int) -> str:
    """Return which setting saves most of these bytes, of activations on the device; empty if less than `asked`."""
    # A gradient is as large as its weight, and is not there yet in the first forward.
    updated, divided = weights + max(weights, gradients), 1 - 1 / levers.replicas
    saved = {
        "checkpointing": activations,
        "offloading": activations,
        "sharding": round((updated + states) * divided),
        "sharded states": round(states * divided),
        "microbatches": activations // 2,
    }
    best = max((feature for feature in saved if feature in levers.settings), key=saved.__getitem__)
    if saved[best] < max(asked, 1):
        return ""
    up_to = "up to " if best in ("checkpointing", "offloading") else ""
    return f"`{levers.settings[best]}` saves most: {up_to}{amount(saved[best])} of this rank's memory"
