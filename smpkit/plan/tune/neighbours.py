"""The configurations around one: what `smpkit tune` tries, `smpkit plan` weighs, and a dying rank advises.

A feature that saves memory is described here and nowhere else. `plan` and a rank that ran out of memory look at
`memory_changes`; `tune` has degrees, microbatches and sharing in its grid, and tries the rest around the best of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from smpkit.config.modelparallel import ModelParallelConfig

CHECKPOINTING: Final = "smp.set_activation_checkpointing(layers)"
_OFFLOADING: Final[Mapping[str, Any]] = {"offload_activations": True, "activation_loading_horizon": "auto"}


@dataclass(frozen=True)
class Change:
    """Another configuration, or another model."""

    setting: str
    """As a user would write it, or the call of the script."""
    feature: Literal["checkpointing", "offloading", "sharding", "sharded states", "microbatches", "degrees"]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that are other ones."""
    is_on: bool = False
    """The job has the setting, and it is taken away."""
    recomputes: bool | None = None
    """Whether layers are checkpointed then; None: as they are now."""

    def of(self, config: ModelParallelConfig) -> dict[str, Any]:
        """Return the parameters of a configuration with the change; those that mean nothing any more are left out."""
        merged = {**config.given(), **self.values}
        if not merged.get("offload_activations"):
            for key in ("activation_loading_horizon", "_shard_offloaded_activations", "shard_offloaded_activations"):
                merged.pop(key, None)
        return merged


def memory_changes(
    config: ModelParallelConfig, replicas: int, *, can_checkpoint: bool, is_checkpointed: bool
) -> Iterator[Change]:
    """Yield the features that change what ranks hold, each switched on, or off where it is on.

    Args:
        replicas: ranks that hold the same weights.
    """
    if can_checkpoint and is_checkpointed:
        yield Change(CHECKPOINTING, "checkpointing", {"offload_activations": False}, is_on=True, recomputes=False)
    elif can_checkpoint:
        yield Change(CHECKPOINTING, "checkpointing", recomputes=True)
        both = f"offload_activations: true, and {CHECKPOINTING}"
        yield Change(both, "offloading", _OFFLOADING, recomputes=True)
    if config.offload_activations:
        yield Change("offload_activations: true", "offloading", {"offload_activations": False}, is_on=True)
    elif is_checkpointed:
        yield Change("offload_activations: true", "offloading", _OFFLOADING)
    degree = config.sharded_data_parallel_degree
    if replicas * config.tensor_parallel_degree > 1 and degree == 1:
        is_on = config.shard_optimizer_state
        turned = {"ddp": True, "shard_optimizer_state": not is_on}
        yield Change("shard_optimizer_state: true", "sharded states", turned, is_on)
    if degree > 1:
        setting = f"sharded_data_parallel_degree: {degree}"
        yield Change(setting, "sharding", {"sharded_data_parallel_degree": 1}, is_on=True)
    elif replicas > 1:
        values = {"ddp": True, "sharded_data_parallel_degree": replicas, "shard_optimizer_state": False}
        yield Change(f"sharded_data_parallel_degree: {replicas}", "sharding", values)
    twice, stages = 2 * config.microbatches, config.pipeline_parallel_degree
    yield Change(f"microbatches: {twice}", "microbatches", {"microbatches": twice})
    if config.active_microbatches > stages > 1:
        yield Change(f"active_microbatches: {stages}", "degrees", {"active_microbatches": stages})
    if replicas % 2 == 0:
        yield Change(f"pipeline_parallel_degree: {2 * stages}", "degrees", {"pipeline_parallel_degree": 2 * stages})


def speed_changes(config: ModelParallelConfig, *, on_host: bool) -> Iterator[dict[str, Any]]:
    """Yield the parameters that the schedule, the partition and offloading may have for these degrees.

    Where ranks compute on the host, there is nothing to offload to.
    """
    base = config.given()
    stages, rounds = config.pipeline_parallel_degree, config.microbatches
    if not on_host:
        for horizon in ("auto", 4, 2):
            yield {**base, **_OFFLOADING, "activation_loading_horizon": horizon}
        yield {**base, "offload_activations": "auto", "activation_loading_horizon": "auto"}
    if stages == 1:
        return
    for name in ("zero_bubble", "interleaved"):
        yield {**base, "pipeline": name}
    for weight in (0.0, 0.2, 0.5):
        yield {**base, "memory_weight": weight}
    for active in sorted({min(count, rounds) for count in (stages, stages + 2, 2 * stages, rounds)}):
        yield {**base, "active_microbatches": active}
    yield {**base, "active_microbatches": rounds, "pipeline": "simple"}
    unlimited = {key: value for key, value in base.items() if key != "active_microbatches"}
    for chunks in (2, 3, 4):
        yield {**unlimited, "virtual_pipeline_degree": chunks}
        for weight in (0.0, 0.2):
            yield {**unlimited, "virtual_pipeline_degree": chunks, "memory_weight": weight}
    yield {**base, "pipeline": "zero_bubble", "memory_weight": 0.0}
