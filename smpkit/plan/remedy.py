"""The one setting that would save a rank most, by what it holds: for a rank that ran out of memory.

`smpkit plan --model` says it by the simulated schedule, before anything runs (`smpkit.plan.tune.features`). A rank that
is about to die has neither the time nor the model's description for that, but it has figures of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from smpkit.config.modelparallel import ModelParallelConfig

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
    return max(
        _remedies(config, replicas, weights, gradients, states, activations, is_checkpointed),
        key=lambda each: each.saved_bytes,
        default=None,
    )


def _remedies(
    config: ModelParallelConfig,
    replicas: int,
    weights: int,
    gradients: int,
    states: int,
    activations: int,
    is_checkpointed: bool,
) -> list[Remedy]:
    found = []
    if not is_checkpointed:
        found.append(Remedy("smp.set_activation_checkpointing on each layer", activations, is_bound=True))
    elif not config.offload_activations:
        found.append(Remedy("offload_activations: true", activations, is_bound=True))
    # A gradient is as large as its weight, and is not there yet in the first forward.
    updated = weights + max(weights, gradients)
    if replicas > 1 and config.sharded_data_parallel_degree == 1:
        kept = 1 - 1 / replicas
        found.append(Remedy(f"sharded_data_parallel_degree: {replicas}", round((updated + states) * kept)))
        if not config.shard_optimizer_state:
            found.append(Remedy("shard_optimizer_state: true", round(states * kept)))
    found.append(Remedy(f"microbatches: {2 * config.microbatches}", activations // 2))
    return [each for each in found if each.saved_bytes > 0]
