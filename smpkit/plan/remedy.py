"""The one setting that would save a rank most, by what it holds: for a rank that ran out of memory.

`smpkit plan --model` weighs the same changes by the simulated schedule, before anything runs
(`smpkit.plan.tune.features`). A rank that is about to die has neither the time nor the model's description for that,
but it has figures of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.tune.neighbours import memory_changes

__all__ = ["Remedy", "best_remedy"]


@dataclass(frozen=True)
class Remedy:
    """A setting, and what it would save of what a rank holds."""

    setting: str
    saved_bytes: int
    is_bound: bool = False
    """The figure is the most that it can save."""


def best_remedy(
    config: ModelParallelConfig,
    replicas: int,
    *,
    weights: int,
    gradients: int,
    states: int,
    activations: int,
    is_checkpointed: bool,
) -> Remedy | None:
    """Return what saves most; None if nothing does.

    Args:
        replicas: ranks that hold the same weights.
        activations: what waits for its backward on the device.
        is_checkpointed: layers are checkpointed already.
    """
    # A gradient is as large as its weight, and is not there yet in the first forward.
    updated, divided = weights + max(weights, gradients), 1 - 1 / replicas
    saved = {
        "checkpointing": activations,
        "offloading": activations,
        "sharding": round((updated + states) * divided),
        "sharded states": round(states * divided),
        "microbatches": activations // 2,
    }
    remedies = [
        Remedy(change.setting, saved[change.feature], is_bound=change.feature in ("checkpointing", "offloading"))
        for change in memory_changes(config, replicas, can_checkpoint=True, is_checkpointed=is_checkpointed)
        if not change.is_on and saved.get(change.feature)
    ]
    return max(remedies, key=lambda each: each.saved_bytes, default=None)
