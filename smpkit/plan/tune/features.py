"""What each feature that saves memory saves and costs in a plan, and the one change by which a model fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from smpkit.plan.decide import Plan, decide
from smpkit.plan.memory import ModelFacts
from smpkit.plan.speed import Speed
from smpkit.plan.tune.chain import Choice
from smpkit.plan.tune.predict import RuledOut, choose_layers, layers_of, scaled, with_choices

__all__ = ["Feature", "automatic", "features", "peak_of", "remedy", "step_of"]


@dataclass(frozen=True)
class Feature:
    """A plan that differs from another one in one setting."""

    setting: str
    """As a user would write it, or the call of the script."""
    is_on: bool
    """The plan has it, and the other one does not."""
    peak_bytes: int
    """Of the fullest rank with the change."""
    saved_bytes: int
    """What the fullest rank holds less with the feature than without it."""
    cost: float
    """By which share a sample takes longer with it than without it; less than 0: it is faster. Communication between
    replicas is left out."""
    host_bytes: int = 0
    """What it needs on the host."""


_CHECKPOINTING = "smp.set_activation_checkpointing on each layer"


def features(
    config: ModelParallelConfig, num_ranks: int, model: ModelFacts, speed: Speed, optimizer: str, plan: Plan
) -> list[Feature]:
    """Return the features that change what ranks hold, those that save most first."""
    found = []
    for setting, is_on, changed in _variants(config, num_ranks, model, speed, optimizer):
        if is_on:
            saved, base, other = peak_of(changed) - peak_of(plan), changed, plan
        else:
            saved, base, other = peak_of(plan) - peak_of(changed), plan, changed
        host = max((each.host_bytes for each in other.memory), default=0)
        host -= max((each.host_bytes for each in base.memory), default=0)
        time = _of_sample(base)
        cost = _of_sample(other) / time - 1 if time else 0.0
        if saved or host:
            found.append(Feature(setting, is_on, peak_of(changed), saved, cost, max(0, host)))
    return sorted(found, key=lambda each: each.saved_bytes, reverse=True)


def remedy(found: list[Feature], limit_bytes: float) -> Feature | None:
    """Return the one change by which the model fits, of several the one that costs least time; None: none does."""
    fitting = [each for each in found if not each.is_on and each.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda each: each.cost, default=None)


def automatic(
    config: ModelParallelConfig, model: ModelFacts, plan: Plan, speed: Speed, limit_bytes: float
) -> dict[str, Choice] | None:
    """Return what layers of strategy "auto" would do within this memory; None: nothing fits, or there are none."""
    layers = layers_of(model)
    if not layers:
        return None
    costs = {unit.cost.name: unit.cost for unit in model.units}
    present = {name: Choice.RECOMPUTE if costs[name].boundary_bytes else Choice.KEEP for name in layers}
    found = choose_layers(config, plan, layers, present, (limit_bytes, inf), speed, on_host=False)
    return None if isinstance(found, RuledOut) else found[0]


def peak_of(plan: Plan) -> int:
    """Return what the fullest rank holds."""
    return max(memory.total_bytes for memory in plan.memory)


def step_of(plan: Plan) -> float:
    """Return how long the schedule takes, and what offloading adds to it."""
    return plan.timeline.makespan_seconds + max((each.stall_seconds for each in plan.forecasts), default=0.0)


def _of_sample(plan: Plan) -> float:
    """Return a number as large as the time of a sample: with more stages there are fewer replicas."""
    return step_of(plan) * plan.mesh.pp_size


def _variants(
    config: ModelParallelConfig, num_ranks: int, model: ModelFacts, speed: Speed, optimizer: str
) -> Iterator[tuple[str, bool, Plan]]:
    """Yield plans that differ in one setting, with its name, and whether the feature is what was taken away."""

    def planned(changed: ModelFacts = model, **values: Any) -> Plan | None:
        try:
            changed_config, _ = ModelParallelConfig.from_sources(_merged(config.given(), values), None)
            if changed_config.world_problems(num_ranks):
                return None
            return decide(changed_config, num_ranks, changed, speed, optimizer)
        except ConfigError:
            return None

    def variant(setting: str, is_on: bool, plan: Plan | None) -> Iterator[tuple[str, bool, Plan]]:
        if plan is not None:
            yield setting, is_on, plan

    replicas = num_ranks // (config.pipeline_parallel_degree * config.tensor_parallel_degree)
    readers = num_ranks // config.pipeline_parallel_degree
    layers = layers_of(model)
    recomputed = with_choices(model, layers, dict.fromkeys(layers, Choice.RECOMPUTE))
    if layers and any(unit.cost.boundary_bytes for unit in model.units):
        kept = with_choices(model, layers, dict.fromkeys(layers, Choice.KEEP))
        yield from variant(_CHECKPOINTING, True, planned(kept, offload_activations=False))
    elif layers:
        yield from variant(_CHECKPOINTING, False, planned(recomputed))
        yield from variant(f"offload_activations: true, and {_CHECKPOINTING}", False, planned(
            recomputed, offload_activations=True, activation_loading_horizon="auto"
        ))  # fmt: skip
    if config.offload_activations:
        yield from variant("offload_activations: true", True, planned(offload_activations=False))
    elif model.has_boundaries:
        plan = planned(offload_activations=True, activation_loading_horizon="auto")
        yield from variant("offload_activations: true", False, plan)
    if readers > 1 and config.sharded_data_parallel_degree == 1:
        is_on = config.shard_optimizer_state
        plan = planned(ddp=True, shard_optimizer_state=not is_on)
        yield from variant("shard_optimizer_state: true", is_on, plan)
    if config.sharded_data_parallel_degree > 1:
        setting = f"sharded_data_parallel_degree: {config.sharded_data_parallel_degree}"
        yield from variant(setting, True, planned(sharded_data_parallel_degree=1))
    elif replicas > 1:
        setting = f"sharded_data_parallel_degree: {replicas}"
        plan = planned(ddp=True, sharded_data_parallel_degree=replicas, shard_optimizer_state=False)
        yield from variant(setting, False, plan)
    twice = 2 * config.microbatches
    if model.samples % 2 == 0:
        yield from variant(f"microbatches: {twice}", False, planned(scaled(model, 0.5), microbatches=twice))
    stages = config.pipeline_parallel_degree
    if stages > 1 and config.active_microbatches > stages:
        yield from variant(f"active_microbatches: {stages}", False, planned(active_microbatches=stages))
    if num_ranks % (2 * stages * config.tensor_parallel_degree) == 0:
        plan = planned(pipeline_parallel_degree=2 * stages)
        yield from variant(f"pipeline_parallel_degree: {2 * stages}", False, plan)


def _merged(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with changes; those that mean nothing any more are left out."""
    merged = {**given, **values}
    if not merged.get("offload_activations"):
        merged.pop("activation_loading_horizon", None)
        merged.pop("_shard_offloaded_activations", None)
        merged.pop("shard_offloaded_activations", None)
    return merged
