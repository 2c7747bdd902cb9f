"""The sentence for a rank that ran out of memory: the one setting that would save it most, by what it held.

`smpkit plan --model` says it by the simulated schedule, before anything runs (`smpkit.plan.tune.features`). When a rank
has died, its launcher has the figures of the rank's status page instead, and asks for this sentence once.
"""

from __future__ import annotations

from dataclasses import dataclass

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.units import amount

__all__ = ["Levers", "memory_hint"]


@dataclass(frozen=True)
class Levers:
    """What a job has set of all that saves memory.

    Args:
        replicas: ranks that hold the same weights.
        shards_model: `sharded_data_parallel_degree` is above 1.
        shards_states: `shard_optimizer_state` is true.
        checkpoints: layers are checkpointed.
        offloads: `offload_activations` is not false.
    """

    replicas: int
    microbatches: int
    shards_model: bool
    shards_states: bool
    checkpoints: bool
    offloads: bool

    @classmethod
    def of(cls, config: ModelParallelConfig, replicas: int, *, is_checkpointed: bool) -> Levers:
        """Return what a configuration sets."""
        return cls(
            replicas,
            config.microbatches,
            config.sharded_data_parallel_degree > 1,
            config.shard_optimizer_state,
            is_checkpointed,
            bool(config.offload_activations),
        )


def memory_hint(levers: Levers, *, weights: int, gradients: int, states: int, activations: int) -> str:
    """Return which setting saves most of these bytes; empty if none does.

    Args:
        activations: what waits for its backward on the device.
    """
    saved = {}
    if not levers.checkpoints:
        saved["smp.set_activation_checkpointing on each layer"] = activations
    elif not levers.offloads:
        saved["offload_activations: true"] = activations
    bounds = {*saved}  # of these the figure is the most that they can save
    if levers.replicas > 1 and not levers.shards_model:
        kept = 1 - 1 / levers.replicas
        # A gradient is as large as its weight, and is not there yet in the first forward.
        updated = weights + max(weights, gradients)
        saved[f"sharded_data_parallel_degree: {levers.replicas}"] = round((updated + states) * kept)
        if not levers.shards_states:
            saved["shard_optimizer_state: true"] = round(states * kept)
    saved[f"microbatches: {2 * levers.microbatches}"] = activations // 2
    best = max(saved, key=saved.__getitem__)
    if saved[best] <= 0:
        return ""
    return f"`{best}` saves most: {'up to ' * (best in bounds)}{amount(saved[best])} of this rank's memory"
