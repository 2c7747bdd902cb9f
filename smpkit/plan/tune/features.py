"""What each feature that saves memory saves and costs in a plan, and the one change by which a model fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from smpkit.plan.decide import Plan, decide
from smpkit.plan.memory import ModelFacts
from smpkit.plan.speed import Speed
from smpkit.plan.tune.chain import Choice
from smpkit.plan.tune.neighbours import memory_changes
from smpkit.plan.tune.predict import layers_of, scaled, with_choices


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


def features(
    config: ModelParallelConfig, num_ranks: int, model: ModelFacts, speed: Speed, optimizer: str, plan: Plan
) -> list[Feature]:
    """Return the features that change what ranks hold, those that save most first."""
    weighed = []
    replicas = num_ranks // (config.pipeline_parallel_degree * config.tensor_parallel_degree)
    layers = layers_of(model)
    for change in memory_changes(config, replicas, can_checkpoint=bool(layers), is_checkpointed=model.has_boundaries):
        changed_model = model
        if change.recomputes is not None:
            choice = Choice.RECOMPUTE if change.recomputes else Choice.KEEP
            changed_model = with_choices(model, layers, dict.fromkeys(layers, choice))
        if change.feature == "microbatches":
            if model.samples % 2:
                continue
            changed_model = scaled(model, 0.5)
        try:
            changed_config, _ = ModelParallelConfig.from_sources(change.of(config), None)
            changed = decide(changed_config, num_ranks, changed_model, speed, optimizer)
        except ConfigError:
            continue
        without, with_it = (changed, plan) if change.is_on else (plan, changed)
        saved, host = peak_of(without) - peak_of(with_it), _host_bytes(with_it) - _host_bytes(without)
        time = _of_sample(without)
        cost = _of_sample(with_it) / time - 1 if time else 0.0
        if saved or host:
            weighed.append(Feature(change.setting, change.is_on, peak_of(changed), saved, cost, max(0, host)))
    return sorted(weighed, key=lambda feature: feature.saved_bytes, reverse=True)


def remedy(known: Sequence[Feature], limit_bytes: float) -> Feature | None:
    """Return the one change by which the model fits, of several the one that costs least time; None: none does."""
    fitting = [feature for feature in known if not feature.is_on and feature.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda feature: feature.cost, default=None)


def peak_of(plan: Plan) -> int:
    """Return what the fullest rank holds."""
    return max(memory.total_bytes for memory in plan.memory)


def _host_bytes(plan: Plan) -> int:
    return max((memory.host_bytes for memory in plan.memory), default=0)


def _of_sample(plan: Plan) -> float:
    """Return what is proportional to the time of a sample: with more stages there are fewer replicas."""
    stall = max((forecast.stall_seconds for forecast in plan.forecasts), default=0.0)
    return (plan.timeline.makespan_seconds + stall) * plan.mesh.pp_size
