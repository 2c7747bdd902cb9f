"""The sentence for a rank that ran out of memory: the one setting that would save it most, by what it held.

`smpkit plan --model` says it by the simulated schedule, before anything runs (`smpkit.plan.tune.features`). When a rank
has died, its launcher has the figures of the rank's status page instead, and asks for this sentence once.
"""

from __future__ import annotations

from dataclasses import dataclass

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.plan.tune.neighbours import memory_changes
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
    # A gradient is as large as its weight, and is not there yet in the first forward.
    updated, divided = weights + max(weights, gradients), 1 - 1 / levers.replicas
    saved = {
        "checkpointing": activations,
        "offloading": activations,
        "sharding": round((updated + states) * divided),
        "sharded states": round(states * divided),
        "microbatches": activations // 2,
    }
    values = {
        "ddp": True,
        "microbatches": levers.microbatches,
        "sharded_data_parallel_degree": levers.replicas if levers.shards_model else 1,
        "shard_optimizer_state": levers.shards_states,
        "offload_activations": levers.offloads,
    }
    config, _ = ModelParallelConfig.from_sources(values, None)
    changes = memory_changes(config, levers.replicas, can_checkpoint=True, is_checkpointed=levers.checkpoints)
    useful = [change for change in changes if not change.is_on and saved.get(change.feature)]
    if not useful:
        return ""
    best = max(useful, key=lambda change: saved[change.feature])
    most = "up to " if best.feature in ("checkpointing", "offloading") else ""
    return f"`{best.setting}` saves most: {most}{amount(saved[best.feature])} of this rank's memory"
