"""Search for the configuration whose step is shortest.

Every combination is one that the schema accepts: candidates are made by validating parameters. A bound on the time of
each one orders them; they are predicted in full from the best bound on, and the search ends when no bound is below the
best prediction, or when the time is over: then it says how much faster one that is left could be. Around the best ones
schedule, virtual stages, microbatches in flight, offloading and the partition's weight are varied.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from smpkit.config.modelparallel import ModelParallelConfig
from smpkit.errors import ConfigError
from smpkit.plan.memory import half_of
from smpkit.plan.optimizers import OPTIMIZERS
from smpkit.plan.tune.neighbours import speed_changes
from smpkit.plan.tune.predict import Job, Prediction, RuledOut, predict, usable_bytes
from smpkit.units import amount

_VARIED: Final = 4
"""Around how many of the best the rest is varied."""
_MOST_MICROBATCHES: Final = 128
_PATIENCE: Final = 4
"""How many times as long it may take to find a first one that fits."""
_FIRST_SHARE: Final = 0.6
"""Of the time, for degrees and microbatches; the rest is for what is varied around the best."""
_WORTH: Final = 0.005
"""A configuration further from the user's must be faster by this share."""
_DEPENDENT: Final = frozenset(
    {"active_microbatches", "virtual_pipeline_degree", "pipeline", "partitions", "offload_activations"}
    | {"activation_loading_horizon", "memory_weight", "auto_partition", "default_partition"}
)
"""Parameters whose defaults are the start of the search; what suits other degrees does not suit these."""
_DEFAULTS: Final = {"shard_optimizer_state": False, "sharded_data_parallel_degree": 1, "tensor_parallel_degree": 1}
"""Parameters that are left out where they say nothing, unless the job has them."""


@dataclass(frozen=True)
class SearchResult:
    """What a search came to."""

    best: tuple[Prediction, ...]
    """The fastest first."""
    present: Prediction | RuledOut | None
    """The job's own configuration; None: it does not fit the ranks, or no model was described for it."""
    num_predicted: int
    """Configurations that were predicted in full."""
    unseen_gap: float
    """By which share of the best step one that was not predicted could be faster; 0: none can."""
    ruled_out: Mapping[str, int]
    """How many were ruled out, by reason."""
    nearest: tuple[ModelParallelConfig, RuledOut] | None
    """Where nothing fits, the configuration that lacks least memory."""
    seconds: float

    @property
    def distinct(self) -> list[Prediction]:
        """The best, of those with one prediction the first; another `memory_weight` often leads to the same parts."""
        first: dict[str, Prediction] = {}
        for prediction in self.best:
            held = [memory.total_bytes for memory in prediction.plan.memory]
            first.setdefault(repr((prediction.parts, held, sorted(prediction.choices.items()))), prediction)
        return list(first.values())


def search(
    job: Job, fixed: Mapping[str, Any], *, budget_seconds: float = 20.0, clock: Callable[[], float] = time.monotonic
) -> SearchResult:
    """Return the best configurations.

    Args:
        job: candidates have the tensor-parallel degrees of its models.
        given: parameters of the job, which hold unless they are searched.
        budget_seconds: for predictions; what has begun is finished.
    """
    began = clock()
    seen = _Seen(job, fixed)
    present = seen.present()
    candidates = list(_candidates(seen))
    patience = began + _PATIENCE * budget_seconds
    unseen = _predict_best(seen, candidates, clock, began + _FIRST_SHARE * budget_seconds, patience)
    for prediction in seen.ranking()[:_VARIED]:
        changes = speed_changes(prediction.config, on_host=job.machine.on_host)
        around = [config for values in changes if (config := seen.accepted(values)) is not None]
        _predict_best(seen, around, clock, began + budget_seconds, patience)
    ranking = seen.ranking()
    gap = 0.0
    if unseen is not None:
        gap = max(0.0, 1 - unseen / ranking[0].step_seconds) if ranking else 1.0
    return SearchResult(
        best=tuple(ranking),
        present=present,
        num_predicted=sum(getattr(outcome, "kind", "") != "states" for _, outcome in seen.outcomes.values()),
        unseen_gap=gap,
        ruled_out=seen.reasons(),
        nearest=None if ranking else seen.nearest(),
        seconds=clock() - began,
    )


@dataclass
class _Seen:
    """What a search has looked at so far, each configuration once."""

    job: Job
    fixed: Mapping[str, Any]
    refused: dict[str, str] = field(default_factory=dict)
    """Why, by the text of parameters that the schema does not accept."""
    outcomes: dict[str, tuple[ModelParallelConfig, Prediction | RuledOut]] = field(default_factory=dict)
    """Each configuration, by its text, and what was predicted of it."""

    def accepted(self, values: Mapping[str, Any]) -> ModelParallelConfig | None:
        """Return the configuration of these parameters, if the schema has one and the ranks can be divided so."""
        merged = {**{key: value for key, value in self.fixed.items() if key not in _DEPENDENT}, **values}
        if self.job.ranks > merged.get("pipeline_parallel_degree", 1):
            merged["ddp"] = True
        for key, default in _DEFAULTS.items():
            if merged.get(key) == default and key not in self.fixed:
                merged.pop(key, None)
        try:
            config, _ = ModelParallelConfig.from_sources(merged, None)
            problems = config.world_problems(self.job.ranks)
        except ConfigError as error:
            problems = list(error.problems)
        if problems:
            words = str(problems[0].message).split(" (", maxsplit=1)[0].split(", got", maxsplit=1)[0]
            self.refuse(merged, f"refused: {problems[0].where} {words}")
            return None
        return config

    def refuse(self, values: Mapping[str, Any], reason: str) -> None:
        self.refused[json.dumps(values, sort_keys=True, default=str)] = reason

    def outcome(self, config: ModelParallelConfig) -> Prediction | RuledOut:
        """Predict a configuration, unless that was done."""
        text = config.model_dump_json()
        if text not in self.outcomes:
            self.outcomes[text] = config, predict(config, self.job)
        return self.outcomes[text][1]

    def present(self) -> Prediction | RuledOut | None:
        """Predict what the job says as it is; None: that does not fit its ranks, or no model was described for it."""
        with suppress(ConfigError):
            config, _ = ModelParallelConfig.from_sources(dict(self.fixed), None)
            if config.tensor_parallel_degree in self.job.models:
                return self.outcome(config)
        return None

    def holds(self, config: ModelParallelConfig, room: int) -> bool:
        """Tell whether weights, gradients and states alone have room; if not, that is the outcome."""
        needed = _least_bytes(self.job, config)
        if needed > room:
            reason = f"weights, gradients and states alone need {amount(needed)}"
            ruled_out = RuledOut("states", reason, round(needed - room))
            self.outcomes.setdefault(config.model_dump_json(), (config, ruled_out))
        return needed <= room

    def ranking(self) -> list[Prediction]:
        """Return what fits, the fastest first; of those as fast the one that changes least."""
        predictions = [outcome for _, outcome in self.outcomes.values() if isinstance(outcome, Prediction)]
        unit = _WORTH * min((prediction.step_seconds for prediction in predictions), default=1.0)

        def changes(prediction: Prediction) -> int:
            values = prediction.config.given()
            return sum(values.get(key) != self.fixed.get(key) for key in {*values, *self.fixed})

        def order(prediction: Prediction) -> tuple[int, int, float]:
            return round(prediction.step_seconds / unit), changes(prediction), prediction.step_seconds

        return sorted(predictions, key=order)

    def reasons(self) -> dict[str, int]:
        """Return how many configurations were ruled out by each reason, the most frequent one first."""
        sentences = {
            "memory": "do not fit the device, however much is recomputed or offloaded",
            "states": "weights, gradients and states alone do not fit",
        }
        counts = Counter(self.refused.values())
        for _, outcome in self.outcomes.values():
            if isinstance(outcome, RuledOut):
                counts[sentences.get(outcome.kind, outcome.reason)] += 1
        return dict(counts.most_common())

    def nearest(self) -> tuple[ModelParallelConfig, RuledOut] | None:
        """Return the configuration that lacks least memory."""
        lacking = [
            (config, outcome)
            for config, outcome in self.outcomes.values()
            if isinstance(outcome, RuledOut) and outcome.missing_bytes
        ]
        return min(lacking, key=lambda pair: pair[1].missing_bytes, default=None)


def _predict_best(
    seen: _Seen, configs: Sequence[ModelParallelConfig], clock: Callable[[], float], end: float, patience: float
) -> float | None:
    """Predict configurations, those of the best bounds first, until the others cannot be faster or the time is over.

    Args:
        end: when the time is over.
        patience: when it is as long as nothing fits.

    Returns:
        The bound of the first that was left although it could be best.
    """
    best = min((prediction.step_seconds for prediction in seen.ranking()), default=None)
    for bound, config in sorted(((_bound(seen.job, config), config) for config in configs), key=lambda pair: pair[0]):
        if best is not None and bound >= best:
            return None
        if clock() > (patience if best is None else end):
            return bound
        outcome = seen.outcome(config)
        if isinstance(outcome, Prediction) and (best is None or outcome.step_seconds < best):
            best = outcome.step_seconds
    return None


# --- candidates -------------------------------------------------------------------------------------------------------


def _candidates(seen: _Seen) -> Iterator[ModelParallelConfig]:
    """Yield what the schema accepts and whose weights, gradients and states fit.

    Degrees, numbers of microbatches, and how replicas share states are combined.
    """
    job, room = seen.job, usable_bytes(seen.job.machine)
    num_units = len(next(iter(job.models.values())).units)
    grid = ((degree, stages) for degree in job.models for stages in _divisors(job.ranks // degree))
    for degree, stages in grid:
        replicas, rest = divmod(job.ranks, degree * stages)
        if rest or stages > num_units:
            continue
        readers = replicas if seen.fixed.get("prescaled_batch") else replicas * degree
        possible = [rounds for rounds in _divisors(job.samples // readers) if rounds <= _MOST_MICROBATCHES]
        for shared in _shared(job, replicas, degree):
            values = {**shared, "pipeline_parallel_degree": stages, "tensor_parallel_degree": degree}
            if job.samples % readers:
                seen.refuse(values, "the samples of a step cannot be divided over the replicas")
                continue
            # Fewer than there are stages leave some idle all the time; they count where there are not more.
            for rounds in [rounds for rounds in possible if rounds >= stages] or possible[-1:]:
                config = seen.accepted({**values, "microbatches": rounds})
                if config is not None and seen.holds(config, room):
                    yield config


def _shared(job: Job, replicas: int, degree: int) -> Iterator[dict[str, Any]]:
    yield {"shard_optimizer_state": False, "sharded_data_parallel_degree": 1}
    if replicas * degree == 1:
        return
    yield {"shard_optimizer_state": True, "sharded_data_parallel_degree": 1}
    per_host = max(1, job.machine.ranks_per_host // degree)
    for shards in sorted({min(per_host, replicas), replicas}):
        if shards > 1 and replicas % shards == 0:
            yield {"shard_optimizer_state": False, "sharded_data_parallel_degree": shards}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# --- bounds -----------------------------------------------------------------------------------------------------------


def _bound(job: Job, config: ModelParallelConfig) -> float:
    """Return a time that no step of a configuration is shorter than.

    All ranks together compute what the samples take. Beside that the last stage waits at least for the forwards of one
    microbatch on the others.
    """
    model = next(iter(job.models.values()))
    flops = sum(unit.cost.flops for unit in model.units) / model.samples
    work = 3 * flops * job.samples / job.ranks / job.machine.flops(half_of(config))
    forward = work / 3 / config.microbatches
    fill = (config.pipeline_parallel_degree - 1) / config.virtual_pipeline_degree * forward
    shared = work * job.machine.ranks_per_host / job.machine.parallel_ranks
    return 0.9 * max(work + fill, shared)


def _least_bytes(job: Job, config: ModelParallelConfig) -> float:
    """Return what the fullest rank holds at least of weights, gradients and states."""
    degree, stages = config.tensor_parallel_degree, config.pipeline_parallel_degree
    replicas = job.ranks // (degree * stages)
    # Tensors of the first tensor rank, one stage of them on a rank.
    weights = sum(tensor.num_bytes for tensor in job.models[degree].tensors.values() if tensor.trainable) / stages
    states = OPTIMIZERS[job.optimizer] * weights
    if config.sharded_data_parallel_degree > 1:
        return (2 * weights + states) / config.sharded_data_parallel_degree
    return 2 * weights + states / (replicas * degree if config.shard_optimizer_state else 1)
